"""The benchmark of the guard's share counts every look that the guard takes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import everyframe
from everyframe.core.events import Step
from everyframe.numerics import tensor_stats
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.stages import guard

PLACE = Path(__file__).parents[3] / "benchmarks" / "guard.py"


@pytest.fixture
def guard_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PLACE.parent)  # as where it is run as a script
    spec = importlib.util.spec_from_file_location("guard_benchmark", PLACE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_look_is_counted(guard_benchmark: Any) -> None:
    """Whoever takes it: looks are counted once more where all of them come together."""
    request = everyframe.Request(
        prompt=guard_benchmark.PROMPT, device="cpu", dtype="fp32", seed=1, num_inference_steps=3
    )
    events = list(guard_benchmark.engine.stream(request, keep=SaveOptions(None)))
    assert len([event for event in events if isinstance(event, Step)]) > 3
    owners = {owner for owner, name in guard_benchmark.looks_of() if name == "value_range"}
    assert owners >= {guard}
    count = 0
    looks = {name: getattr(tensor_stats, name) for name in ("value_range", "blank_frames")}
    code = {function.__code__ for function in looks.values()} | {
        guard_benchmark.engine._check_finite.__code__
    }

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code in code

    sys.setprofile(profile)
    try:
        _, _, counted = guard_benchmark.one_run(request)
    finally:
        sys.setprofile(None)
    assert counted == count >= 10
