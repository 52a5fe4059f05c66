"""Runs of an Open-Sora 2.0 among several ranks, unbroken and broken off, against one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.request import Request
from everyframe.engine.resume import resume_run
from everyframe.engine.run import stream
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import SaveOptions
from helpers.events import frames_by_seed
from helpers.interrupted_ranks import begun, copied, gone_on, told, videos
from helpers.rank_pool import Group, group_of

OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "size": "48x32", "num_frames": 9, "seed": 5,
    "num_inference_steps": 12, "device": "cpu", "first_frame": "flux",
}  # fmt: skip
SLOW = (2, 5, 7)
#: Of frames in 0..1: twelve steps of float32 sums in another order, and a picture in 8 bits, of
#: which a value may round the other way.
CLOSE = 5e-3


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    module = request.node
    mine = [item for item in request.session.items if item.getparent(pytest.Module) is module]
    is_slow = any(item.get_closest_marker("slow") for item in mine)
    yield from group_of((3, *SLOW) if is_slow else (3,))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Here, as ranks import this module too, and transformers takes each of them seconds.
    from helpers.tiny_checkpoints import opensora2 as tiny_opensora2

    model = tiny_opensora2.opensora2(tmp_path_factory.mktemp("models") / "open-sora-2")
    return {**OPTIONS, "model": str(model)}


@pytest.fixture(scope="module")
def alone(asked: dict[str, Any]) -> np.ndarray[Any, Any]:
    frames = frames_by_seed(list(stream(Request(**asked), keep=SaveOptions(None), num_threads=1)))
    return frames[5]


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
@pytest.mark.parametrize("parallel", ["auto", "ring"])
def test_one_video_on_several_ranks(
    ranks: Group, asked: dict[str, Any], alone: Any, tmp_path: Path, size: int, parallel: str
) -> None:
    way = parallel if parallel == "auto" else f"ring={size}"
    found = ranks.run(size, begun, tmp_path, {**asked, "parallel": way}, 0)
    assert np.abs(videos(found)[5] - alone).max() < CLOSE
    assert alone.std() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 15])
def test_a_broken_run_goes_on_with_the_same_bits(
    ranks: Group, asked: dict[str, Any], tmp_path: Path, steps: int
) -> None:
    """On as many ranks; and on one, but for rounding. In the picture's steps and the video's."""
    whole = videos(ranks.run(3, begun, tmp_path / "whole", asked, 0))
    ranks.run(3, begun, tmp_path / "broken", asked, max(steps - 12, 1))
    (run,) = all_runs(tmp_path / "broken")
    again = ranks.run(3, gone_on, copied(run.path, tmp_path), None)
    np.testing.assert_array_equal(videos(again)[5], whole[5])
    one = resume_run(RunFolder(run.path), ranks={"num_devices": 1}, cleans=False)
    assert np.abs(told(list(one), speaks=True)["frames"][5] - whole[5]).max() < CLOSE
