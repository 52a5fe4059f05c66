"""Runs that are interrupted and resumed, against unbroken ones: the same bits.

Here a run is interrupted by letting go of its events, which leaves the folder as a kill does: the
state is written at every step, and nothing is written on the way out.
`end_to_end/test_killed_runs.py` kills processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.events import RunSaved, Step
from everyframe.core.quality import LossyMethod, SamplingMethod
from everyframe.engine.resumption import resume
from everyframe.runs.folder import all_runs
from helpers.interrupted_runs import OPEN_SORA, PICTURE, STEPS, begun, same, stop_before
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import opensora2 as tiny_opensora2
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo
from helpers.tiny_checkpoints import svd as tiny_svd

OPENSORA2: dict[str, Any] = {
    "prompt": "a red circle", "size": "48x32", "num_frames": 9, "seed": 5,
    "text_oscillation": False,
}  # fmt: skip

INPAINT: dict[str, Any] = {
    "prompt": "a red ball", "num_inference_steps": 4, "seed": 3, "control": "canny",
    "mask": "4,4,20,20", "source": np.stack([PICTURE, PICTURE[::-1], PICTURE[:, ::-1]]),
    "frames_at_once": 2,
}  # fmt: skip


def over_limit(name: str, num_computed: int, *numbers: int, **more: Any) -> LossyMethod:
    """A method whose first error is over its limit."""
    return LossyMethod(SamplingMethod(name, num_computed, *numbers, limit=1e-9, **more))


#: The cases of every run of the tests; the others are slow ones.
FAST = ("opensora-1.2-chain", "svd", "inpaint-unipc", "svd-lossy", "opensora-1.2-lossy")

#: What is interrupted: the maker of its model, and what is asked of it.
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "opensora-1.2": (tiny_opensora.opensora_1_2, OPEN_SORA),
    "opensora-1.2-chain": (
        tiny_opensora.opensora_1_2,
        {**OPEN_SORA, "chain": 2, "num_videos": 2, "image": PICTURE, "edit_strength": 0.5},
    ),
    "opensora-1.0": (tiny_opensora.opensora_1_0, {**OPEN_SORA, "num_videos": 2}),
    "svd": (
        tiny_svd.svd,
        {"image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
         "num_inference_steps": STEPS},
    ),
    "stepvideo": (
        tiny_stepvideo.stepvideo,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 1, "num_videos": 2, "seed": 3,
         "num_inference_steps": STEPS},
    ),
    "stepvideo-int8": (
        tiny_stepvideo.stepvideo,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 1, "seed": 3, "quantize": "int8",
         "num_inference_steps": STEPS},
    ),
    "svd-lossy": (
        tiny_svd.svd,
        {"image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
         "num_inference_steps": 8, "quality": "unipc@5g50"},
    ),
    "svd-deepcache": (
        tiny_svd.svd,
        {"image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
         "num_inference_steps": 8, "quality": "deepcache@3g50"},
    ),
    "svd-deepcache-over-limit": (
        tiny_svd.svd,
        {"image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
         "num_inference_steps": 8, "method": over_limit("deepcache", 3)},
    ),
    "opensora-1.2-lossy": (
        tiny_opensora.opensora_1_2,
        {**OPEN_SORA, "num_videos": 2, "num_inference_steps": 7, "quality": "taylor1@4"},
    ),
    "opensora-1.2-over-limit": (
        tiny_opensora.opensora_1_2,
        {**OPEN_SORA, "num_inference_steps": 9,
         "method": over_limit("taylor2", 4, 2)},
    ),
    "opensora-1.2-held": (
        tiny_opensora.opensora_1_2,
        {**OPEN_SORA, "num_videos": 2, "num_inference_steps": 8, "quality": "abm2@6h"},
    ),
    "svd-held": (
        tiny_svd.svd,
        {"image": PICTURE, "height": 32, "width": 32, "num_frames": 3, "seed": 3,
         "num_inference_steps": 8, "quality": "unipc@6h"},
    ),
    "stepvideo-held-over-limit": (
        tiny_stepvideo.stepvideo,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 1, "seed": 3,
         "num_inference_steps": 9,
         "method": over_limit("ab2", 6, holds_guidance=True)},
    ),
    "opensora-1.0-lossy": (
        tiny_opensora.opensora_1_0, {**OPEN_SORA, "num_inference_steps": 7, "quality": "dpm2m@4"}
    ),
    "stepvideo-lossy": (
        tiny_stepvideo.stepvideo,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 1, "seed": 3,
         "num_inference_steps": 9, "method": over_limit("ab2", 4)},
    ),
    "opensora2-solver": (
        tiny_opensora2.opensora2,
        {**OPENSORA2, "image": PICTURE, "num_inference_steps": 7, "quality": "abm2@4"},
    ),
    "opensora2-predicted": (
        tiny_opensora2.opensora2,
        {
            **OPENSORA2, "first_frame": "flux", "first_frame_resolution": "video",
            "num_inference_steps": 6, "quality": "taylor1@3",
        },
    ),
    "inpaint-pndm": (tiny_inpaint.inpaint, INPAINT),
    "inpaint-lossy": (
        tiny_inpaint.inpaint, {**INPAINT, "num_inference_steps": 7, "quality": "taylor1@4"}
    ),
    "inpaint-over-limit": (
        lambda folder: _scheduled(folder, "UniPCMultistepScheduler"),
        {**INPAINT, "num_inference_steps": 7, "method": over_limit("taylor2", 4)},
    ),
    "inpaint-ancestral": (
        lambda folder: _scheduled(folder, "EulerAncestralDiscreteScheduler"), INPAINT
    ),
    "inpaint-unipc": (lambda folder: _scheduled(folder, "UniPCMultistepScheduler"), INPAINT),
    "inpaint-dpm": (lambda folder: _scheduled(folder, "DPMSolverMultistepScheduler"), INPAINT),
}  # fmt: skip


def _scheduled(folder: Path, name: str) -> Path:
    made = tiny_inpaint.inpaint(folder, channels=4)
    tiny_inpaint.with_scheduler(made, name)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_unless(FAST, CASES))
def test_a_run_that_is_interrupted_anywhere_gives_the_same_bits(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    options = {"model": str(make(tmp_path / "model")), **options}
    root = tmp_path / "runs"
    whole = list(begun(root, **options))
    assert not list(all_runs(root)), "a run that is done is removed"
    first = next(place for place, e in enumerate(whole) if isinstance(e, RunSaved))
    places = [p for p, e in enumerate(whole) if p > first and isinstance(e, Step)]
    for place in places[2 :: max(1, len(places) // 3)]:
        folder = stop_before(begun(root, **options), place + 1)
        again = list(resume.resume_run(folder))
        same(whole, again)
        steps = [e for e in again if isinstance(e, Step) and e.stage == "denoise"]
        done = [e for e in whole[: place + 1] if isinstance(e, Step) and e.stage == "denoise"]
        first_done = next((e.step for e in steps), None)
        if len(done) > 0 and options.get("chain", 1) == 1:
            expected = len(done) + 1 if steps else None
            assert first_done == expected, "nothing that was done is done again"
        assert not list(all_runs(root))
