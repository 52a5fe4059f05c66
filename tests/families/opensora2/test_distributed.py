"""Runs of an Open-Sora 2.0 among several ranks, unbroken and interrupted, against one rank's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.plan import Plan, Precision
from everyframe.core.request import Request
from everyframe.engine.request_inputs import read_given
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.families.opensora2.denoiser import TextStates
from everyframe.families.opensora2.settings import latent_shape
from everyframe.families.opensora2.spec import OpenSora2Spec
from everyframe.families.registry import stages_of
from everyframe.parallel.communicator import Communicator, ParallelContext, SingleRank
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import prepare
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.interface import VideoState
from helpers.events import frames_by_seed
from helpers.interrupted_ranks import begun, copied, resume_there, summarize, videos
from helpers.pictures import smooth_picture
from helpers.rank_pool import Group, group_of, runs_slow

OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "size": "48x32", "num_frames": 9, "seed": 5,
    "num_inference_steps": 12, "device": "cpu", "first_frame": "flux",
    "first_frame_resolution": "video",
}  # fmt: skip
SLOW = (2, 5, 7)
#: Of frames in 0..1: twelve steps of float32 sums in another order, and a picture in 8 bits, of
#: which a value may round the other way.
CLOSE = 5e-3


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    yield from group_of((3, *SLOW) if runs_slow(request) else (3,))


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
@pytest.mark.parametrize("parallel", ["auto", pytest.param("ring", marks=pytest.mark.slow)])
def test_one_video_on_several_ranks(
    ranks: Group, asked: dict[str, Any], alone: Any, tmp_path: Path, size: int, parallel: str
) -> None:
    given = parallel if parallel == "auto" else f"ring={size}"
    found = ranks.run(size, begun, tmp_path, {**asked, "parallel": given}, 0)
    assert np.abs(videos(found)[5] - alone).max() < CLOSE
    assert alone.std() > 0.01


def staged(group: Communicator, plan: Plan, options: dict[str, Any], backend: str) -> torch.Tensor:
    """One rank's latents by the plan's stages, from noise in float64."""
    found, _ = find_model(Request(**options), may_fetch=False)
    assert isinstance(found, OpenSora2Spec)
    shape = (1, *latent_shape(found.config, plan.settings))
    generator = torch.Generator().manual_seed(5)
    video = VideoState(5, start_noise=torch.randn(shape, generator=generator, dtype=torch.float64))
    video.inputs = read_given(Request(**options), plan.settings)
    for stage in stages_of(found, plan, 0, ParallelContext(group, group, 1, backend))[:-1]:
        video.begin_stage()
        if stage.name == "denoise":
            texts = (TextStates(each.t5.double(), each.clip.double()) for each in video.text.texts)
            video.text = replace(video.text, texts=tuple(texts))
        list(stage.run([video]))
    latents: torch.Tensor = video.latents
    return latents


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=[pytest.mark.slow] * (backend != "ring"))
        for backend in SEQUENCE_BACKENDS
    ],
)
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_in_float64_nothing_but_the_last_places_differs(
    ranks: Group, asked: dict[str, Any], size: int, backend: str
) -> None:
    """Twelve steps after a given picture, with three branches and with one.

    In a ring; `test_one_video_on_several_ranks` has the other backend, which ``auto`` takes.
    """
    others = {name: value for name, value in asked.items() if not name.startswith("first_frame")}
    options = {**others, "image": smooth_picture(32, 48)}
    plan = prepare(Request(**options)).plan
    wide = replace(
        plan,
        components=tuple(
            replace(part, precision=Precision("float64", "float64"))
            if part.name == "denoiser"
            else part
            for part in plan.components
        ),
    )
    alone = staged(SingleRank(), wide, options, backend)
    assert alone.dtype == torch.float64
    for found in ranks.run(size, staged, wide, options, backend):
        assert float((found - alone).abs().max()) < 1e-12 * float(alone.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 15])
def test_a_broken_run_goes_on_with_the_same_bits(
    ranks: Group, asked: dict[str, Any], tmp_path: Path, steps: int
) -> None:
    """On as many ranks; and on one, but for rounding. In the picture's steps and the video's."""
    whole = videos(ranks.run(3, begun, tmp_path / "whole", asked, 0))
    ranks.run(3, begun, tmp_path / "broken", asked, max(steps - 12, 1))
    (run,) = all_runs(tmp_path / "broken")
    again = ranks.run(3, resume_there, copied(run.path, tmp_path), None)
    np.testing.assert_array_equal(videos(again)[5], whole[5])
    one = resume_run(RunFolder(run.path), ranks={"num_devices": 1}, cleans=False)
    assert np.abs(summarize(list(one), speaks=True)["frames"][5] - whole[5]).max() < CLOSE
