"""A tiny pipeline of `tiny_checkpoints.diffusers`, called as diffusers documents it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

import everyframe
from everyframe.diffusers_pipelines.inputs.signature import NAMES, VIDEO_RESULT, of_pipeline
from everyframe.media.pixels import fit_image
from helpers.tiny_checkpoints.diffusers.cases import PROMPT, SEED, STEPS, Case, as_python


def asked_of(case: Case) -> dict[str, Any]:
    """Options of ours for one run, in Python."""
    asked = {"prompt": PROMPT, "num_inference_steps": STEPS, **case.asked}
    width, height = map(int, asked.pop("size", "16x16").split("x"))
    asked = as_python({k: v for k, v in asked.items() if v is not None}, height, width)
    if "image" in asked:
        # What becomes of one in another shape is no matter of the call.
        asked["image"] = Image.fromarray(fit_image(np.asarray(asked["image"]), height, width))
    return {**asked, "height": height, "width": width}


def built(case: Case) -> tuple[Any, dict[str, Any]]:
    """A case's pipeline, and what is asked of it."""
    pipe, asked = case.build(), asked_of(case)
    pipe.set_progress_bar_config(disable=True)
    if asked.pop("vae_tiling", False):
        pipe.vae.enable_tiling()
    return pipe, asked


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
