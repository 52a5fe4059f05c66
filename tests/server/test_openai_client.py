"""OpenAI's own client drives every route that it has.

`make test-openai` runs further versions of it, against a real server.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.server.settings import Limits
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp, key, listening

# Not imported here: its client takes half a second of each process that collects this file.
pytestmark = pytest.mark.skipif(
    find_spec("openai") is None, reason="the package openai is not installed (extra [dev])"
)

#: Checks that the script has.
NUM_CHECKS = 27


class ShortPrompts(FakeExecutor):
    """Fails on long prompts as a tokenizer does, once the job runs."""

    def run(self, job: Any, *rest: Any) -> Any:
        events = super().run(job, *rest)
        if job.request is not None and len(job.request.prompt or "") > 1000:
            self.failures = [(0, InputError("the prompt has 1212 tokens, this model reads 40"))]
            events = super().run(job, *rest)
        return events

    def plan(self, request: Request) -> Any:
        return super().plan(request.model_copy(update={"num_frames": request.num_frames or 9}))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    keys = (key("me", "secret"),)
    limits = {"limits": Limits(creations_a_minute=None, queued_of_key=None)}
    executor = ShortPrompts(pause=0.05)
    served = ServedApp(tmp_path / "server", executor, keys=keys, runs=True, **limits)
    with served as app, listening(app) as address:
        yield address


def test_every_check_holds(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    from helpers.openai_conformance import Conformance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        checks = Conformance(address, "secret")
        checks.run()
    assert checks.misses == [], capsys.readouterr().out
    assert checks.number == NUM_CHECKS


def test_a_miss_is_seen(address: str) -> None:
    from helpers.openai_conformance import Conformance

    checks = Conformance(address, "another key")
    assert checks.run() > 0
    assert "create_and_life ends" in checks.misses
