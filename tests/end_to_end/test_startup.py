"""What commands may import before they have something to say, each in a fresh interpreter.

Torch takes a second and a half of a processor, transformers and diffusers two or three more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import everyframe
from everyframe.hardware import throughput
from everyframe.hardware.accelerators import may_have_any

PROMPT = "a red circle moves to the right on a blue background"

#: Nothing needs these to plan a model that was planned before.
MODELS = {"transformers", "diffusers", "torch._dynamo", "torch._inductor", "sympy"}
#: And no command itself, whose worker computes.
COMPUTES = MODELS | {"torch"}
#: Nor does a plan clean prompts.
CLEANS = {"bs4", "ftfy", "diffusers.pipelines.latte.pipeline_latte"}
#: What nothing at all takes until a file is read or written, or a chart is drawn.
OTHERS = {"av", "matplotlib", "scipy", "accelerate", "pandas", "IPython", "huggingface_hub"}

_ASK = """
import json, sys
{program}
print("loaded:" + json.dumps(sorted(set({watched!r}) & set(sys.modules))))
"""
_PLAN = f"""
from everyframe.cli.main import main
assert main(["plan", {PROMPT!r}, "--json"]) == 0
"""
_HELP = """
from everyframe.cli.main import main
try: main(["--help"])
except SystemExit: pass
"""
_REFUSED = f"""
from everyframe.cli.main import main
assert main(["generate", {PROMPT!r}, "--size", "3x"]) == 2
"""
#: The other side of a run, up to the plan that it sends.
_FIRST_EVENT = f"""
from everyframe.core.request import Request
from everyframe.engine.run import stream
from everyframe.runs.run_state import SaveOptions
next(stream(Request(prompt={PROMPT!r}, seed=1), keep=SaveOptions(None)))
"""
#: This side of it, up to the first event of the worker.
_PARENT = f"""
from everyframe.core.errors import InputError
from everyframe.engine.workers import launcher, worker_start
def launched(*given):
    raise InputError("the worker says so")
    yield
worker_start.is_possible, worker_start.start_ahead = lambda: True, lambda: None
launcher.run_in_workers = launched
from everyframe.cli.main import main
assert main(["generate", {PROMPT!r}, "-o", "a.mp4"]) == 2
"""


def imported_by(program: str, watched: set[str], folder: Path) -> set[str]:
    """Which of these a fresh interpreter has imported after running `program` there."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK.format(program=program, watched=sorted(watched))],
        check=False, capture_output=True, text=True, timeout=300, cwd=folder,
        env={**os.environ, "EVERYFRAME_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.rsplit("loaded:", 1)[1]))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder whose cache knows the plan, after so many plans that all trials are settled.

    And what the first of them imported. The others are made here: a process imports torch for the
    trials that the first left open, where the cores were busy.
    """
    folder = tmp_path_factory.mktemp("used")
    imported = imported_by(_PLAN, COMPUTES | CLEANS | {"av", "matplotlib"}, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("EVERYFRAME_CACHE", str(folder / "cache"))
        for _ in range(int(throughput.ENOUGH_TRIALS)):
            patch.setattr(throughput, "_TRIED", {})  # as in another process
            everyframe.plan(PROMPT)
    return folder, imported


@pytest.fixture
def used(plans: tuple[Path, set[str]]) -> Path:
    return plans[0]


def test_a_first_plan_imports_what_it_runs_dry(plans: tuple[Path, set[str]]) -> None:
    """So these would be seen; what cleans prompts and reads tokenizers there is not among them."""
    assert {"torch", "transformers", "diffusers"} <= plans[1] <= COMPUTES


@pytest.mark.skipif(
    may_have_any(metadata.version("torch")), reason="a torch that may have cards is asked for them"
)
def test_a_second_plan_imports_neither_torch_nor_models(used: Path) -> None:
    assert imported_by(_PLAN, COMPUTES | OTHERS | {"numpy", "PIL"}, used) == set()


def test_a_run_that_was_planned_before_has_its_first_event_without_models(used: Path) -> None:
    assert imported_by(_FIRST_EVENT, COMPUTES | OTHERS, used) == {"torch"}


@pytest.mark.parametrize("program", [_HELP, _REFUSED])
def test_what_needs_no_plan_imports_nothing_slow(program: str, tmp_path: Path) -> None:
    assert imported_by(program, COMPUTES | OTHERS | {"numpy", "PIL", "rich"}, tmp_path) <= {"rich"}


def test_the_command_that_waits_for_a_worker_imports_no_torch(tmp_path: Path) -> None:
    assert imported_by(_PARENT, COMPUTES | {"av"}, tmp_path) == {"av"}
