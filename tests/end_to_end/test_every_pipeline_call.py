"""Diffusers' own arguments of a call, given to each of its video pipelines in memory.

What comes back is compared bit for bit with what the pipeline gives by itself, under torch's own
attention. The whole sweep runs with ``--slow``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.diffusers_pipelines.inputs.signature import NAMES, VIDEO_RESULT, of_pipeline
from everyframe.media.pixels import fit_image
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import PROMPT, SEED, STEPS, Case, as_python

#: What is tried of each, where it has the parameter.
VARIED: tuple[dict[str, Any], ...] = (
    {"output_type": "np"}, {"output_type": "pt"}, {"output_type": "pil"},
    {"output_type": "latent"}, {"num_videos_per_prompt": 2}, {"num_images_per_prompt": 2},
)  # fmt: skip


def asked_of(case: Case) -> dict[str, Any]:
    """Options of ours for one run, in Python."""
    asked = {"prompt": PROMPT, "num_inference_steps": STEPS, **case.asked}
    width, height = map(int, asked.pop("size", "16x16").split("x"))
    asked = as_python({k: v for k, v in asked.items() if v is not None}, height, width)
    if "image" in asked:
        # What becomes of one in another shape is no matter of the call.
        asked["image"] = Image.fromarray(fit_image(np.asarray(asked["image"]), height, width))
    return {**asked, "height": height, "width": width}


def theirs(pipe: Any, asked: dict[str, Any], varied: dict[str, Any]) -> Any:
    """What the pipeline gives by itself."""
    taken, asked = of_pipeline(pipe).parameters, dict(asked)
    call: dict[str, Any] = {"generator": torch.Generator().manual_seed(SEED), **varied}
    for name, value in asked.pop("option", {}).items():
        record = taken[name].record
        call[name] = [record(**each) for each in value] if record else value
    if "seed" in taken:
        call["seed"] = SEED
    for name, value in asked.items():
        own = next((each for each in NAMES[name] if each in taken), None)
        call |= {own: value} if own else {}
    call.setdefault("output_type", "np")
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(SEED)
    if not hasattr(pipe, "blocks"):
        return pipe(**{name: value for name, value in call.items() if name in taken})
    return {VIDEO_RESULT: pipe(**call, output=[VIDEO_RESULT])[VIDEO_RESULT]}


def ours(pipe: Any, asked: dict[str, Any], varied: dict[str, Any]) -> Any:
    """What a run gives."""
    taken = of_pipeline(pipe)
    sides = ("height", "width") if taken.name_of("height") is None else ()
    given = {name: value for name, value in asked.items() if name not in sides}
    option = {**given.pop("option", {}), **varied}
    given |= {"seed": SEED} if taken.name_of("seed") else {}
    return everyframe.run(pipe, output="float", option=option, **given)


def leaves(value: Any) -> Iterator[Any]:
    """Arrays of the frames of an output, or of videos of ours."""
    if isinstance(value, everyframe.Video):
        yield value.frames
    elif isinstance(value, torch.Tensor):
        yield value.float().numpy()
    elif isinstance(value, np.ndarray):
        yield from value if value.ndim == 5 else [value]
    elif isinstance(value, Image.Image):
        yield np.asarray(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        yield from leaves(next(value[name] for name in ("frames", "video", VIDEO_RESULT)
                               if name in value))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_pipeline_gives(name: str) -> None:
    case = CASES[name]
    with case.within():
        pipe = case.build()
        pipe.set_progress_bar_config(disable=True)
        asked, taken = asked_of(case), of_pipeline(pipe).parameters
        if asked.pop("vae_tiling", False):
            pipe.vae.enable_tiling()
        num_compared = 0
        for varied in VARIED:
            if not varied.keys() <= taken.keys():
                continue
            try:
                wanted = list(leaves(theirs(pipe, asked, varied)))
            except (ValueError, RuntimeError, AssertionError):
                # Diffusers itself can't; many pipelines are never called for several videos.
                with pytest.raises(everyframe.EveryframeError):
                    ours(pipe, asked, varied)
                continue
            found = list(leaves(ours(pipe, asked, varied)))
            assert len(found) == len(wanted), varied
            for one, other in zip(found, wanted, strict=True):
                assert np.array_equal(one, other), (varied, np.abs(one - other).max())
            num_compared += 1
        assert num_compared >= 3, "np, pt and pil are of every pipeline"
