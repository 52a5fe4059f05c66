"""The command that serves: what it starts before the first request."""

from __future__ import annotations

import time
from typing import Any

import pytest

from everyframe.cli.serve import _executor
from everyframe.engine.workers import warm_workers
from everyframe.engine.workers.worker_start import IN_PROCESS


class Idle:
    """Stands for a worker process that has no job."""

    made: list[Idle]
    warm = ()
    is_killed = False

    def __init__(self) -> None:
        self.made.append(self)

    def end_now(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[Idle]:
    monkeypatch.setattr(Idle, "made", [], raising=False)
    monkeypatch.setattr(warm_workers, "Worker", Idle)
    monkeypatch.delenv(IN_PROCESS)
    return Idle.made


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, 1), ({"keep_warm": "1m"}, 1), ({"keep_warm": "0"}, 0)],
)
def test_a_worker_imports_before_the_first_request(
    given: dict[str, Any], count: int, idle: list[Idle]
) -> None:
    executor = _executor("workers", given)()
    assert len(idle) == count
    executor.close()
    assert all(each.is_killed for each in idle)


def test_a_worker_that_no_request_needs_ends(idle: list[Idle]) -> None:
    executor = _executor("workers", {"keep_warm": "50ms"})()
    until = time.monotonic() + 10
    while not idle[0].is_killed and time.monotonic() < until:
        time.sleep(0.01)
    assert idle[0].is_killed
    executor.close()
