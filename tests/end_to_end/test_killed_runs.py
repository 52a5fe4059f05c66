"""Five runs that are killed, two of them inside a write, by what `benchmarks/kill.py` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from everyframe.families.opensora import stages  # noqa: F401 - so that no fork imports it
from helpers.tiny_checkpoints import opensora as tiny_opensora

PLACE = Path(__file__).parents[2] / "benchmarks" / "kill.py"


@pytest.fixture(scope="module")
def kill() -> Any:
    spec = importlib.util.spec_from_file_location("kill", PLACE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["kill"] = made  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLACE.parent)  # as where it is run as a script
        spec.loader.exec_module(made)
    return made


def test_killed_runs_go_on(kill: Any, tmp_path: Path) -> None:
    model = tiny_opensora.opensora_1_2(tmp_path / "model")
    options = {
        "model": str(model), "prompt": "a red circle", "size": "16x16", "num_frames": 3,
        "num_inference_steps": 3, "seed": 3, "num_videos": 2,
    }  # fmt: skip
    for name in ("first", "whole"):  # the first run writes what plans know of the model, too
        (base := tmp_path / name).mkdir()
        wanted, counts = kill.whole(base, options)
    assert counts.calls > 20, "the state is written at every step"
    moments = [
        (kill.Moment(event=6), None),
        (kill.Moment(event=counts.events // 2, delay=0.02), kill.Moment(call=3)),
        (kill.Moment(event=counts.events - 6), None),
        (kill.Moment(call=counts.calls // 2), None),
        (kill.Moment(call=counts.calls // 2 + 1, after=True), None),
    ]
    for number, (moment, again) in enumerate(moments):
        (root := tmp_path / str(number)).mkdir()
        outcome = kill.kill_once(root, options, wanted, moment, again)
        assert outcome.same, (moment, outcome)
        assert outcome.kills >= 1, (moment, outcome)
