"""Interrupted runs of a Step-Video among ranks: on as many ranks the same bits come out, on another
number of them, or by another way of exchange, the same but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.events import Step
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import load_run, resume_run
from everyframe.engine.run import stream
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from helpers.interrupted_ranks import begun, check_close, copied, resume_there, summarize, videos
from helpers.rank_pool import Group, group_of

#: Three pieces to decode; 14 tokens of each branch, and three heads.
OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "height": 16, "width": 32, "num_frames": 35, "seed": 5,
    "num_inference_steps": 3, "device": "cpu",
}  # fmt: skip
STEP = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2, 3))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Here, as ranks import this module too, and transformers takes each of them seconds.
    from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

    model = tiny_stepvideo.stepvideo(tmp_path_factory.mktemp("models") / "tiny-step")
    return {**OPTIONS, "model": str(model)}


@pytest.fixture(scope="module")
def kept(
    ranks: Group, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, Any]]:
    """A run of three ranks, let go after 2 of its 3 steps; and the frames of an unbroken one."""
    root = tmp_path_factory.mktemp("runs")
    whole = ranks.run(3, begun, root / "whole", asked, 0)
    ranks.run(3, begun, root / "broken", asked, STEP)
    (run,) = all_runs(root / "broken")
    return run.path, videos(whole)


def test_on_as_many_ranks_it_has_the_same_bits(
    ranks: Group, kept: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    path, whole = kept
    found = ranks.run(3, resume_there, copied(path, tmp_path), None)
    np.testing.assert_array_equal(videos(found)[5], whole[5])
    assert [each["steps"] for each in found] == [[(5, 3)]] * 3, (
        "nothing that was done is done again"
    )


@pytest.mark.parametrize(
    ("size", "parallel"), [(2, "auto"), (2, "ring=2"), (2, "cfg=2"), (3, "ring=3")]
)
def test_on_other_ranks_only_rounding_differs(
    ranks: Group, kept: tuple[Path, dict[int, Any]], tmp_path: Path, size: int, parallel: str
) -> None:
    path, whole = kept
    place = copied(path, tmp_path)
    found = ranks.run(size, resume_there, place, {"num_devices": size, "parallel": parallel})
    check_close(videos(found), whole)
    assert [each["steps"] for each in found] == [[(5, 3)]] * size
    division = load_run(RunFolder(place)).plan.parallel
    assert division is not None
    assert len(division.ranks) == size
    assert (division.backend == "ring") == parallel.startswith("ring")


def test_on_one_device(kept: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    path, whole = kept
    events = resume_run(RunFolder(copied(path, tmp_path)), ranks={"num_devices": 1}, cleans=False)
    check_close(summarize(list(events), speaks=True)["frames"], whole)


@pytest.mark.parametrize("stage", ["text", "clip text", "denoise"])
def test_begun_on_one_device_and_interrupted_in_any_stage(
    ranks: Group,
    asked: dict[str, Any],
    kept: tuple[Path, dict[int, Any]],
    tmp_path: Path,
    stage: str,
) -> None:
    """After the first step of that stage: what is done of it, or of those before it, is kept."""
    events = stream(Request(**asked), keep=SaveOptions(tmp_path, pace=EVERY_STEP), num_threads=1)
    for event in events:
        if isinstance(event, Step) and event.stage == stage:
            break
    events.close()
    (run,) = all_runs(tmp_path)
    found = ranks.run(3, resume_there, run.path, {"num_devices": 3})
    check_close(videos(found), kept[1])
