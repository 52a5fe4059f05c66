"""A tiny pipeline that is called by its owner, by `everyframe.run` and by `everyframe.stream`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.events import FramesDecoded
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

ASKED: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 2, "seed": 3}


Array = np.ndarray[Any, Any]


def asked_of(name: str) -> dict[str, Any]:
    return {**ASKED, **tiny_pipelines.CALLS[name]}


def theirs(pipe: Any, name: str, seed: int = 3) -> Array:
    """Frames of diffusers, called as its documentation says."""
    asked = {**asked_of(name), "generator": torch.Generator().manual_seed(seed)}
    width, height = map(int, asked.pop("size").split("x"))
    del asked["seed"]
    given = {"height": height, "width": width, **asked.pop("option", {}), **asked}
    frames: Array = pipe(**given, output_type="np").frames[0]
    return frames


def ours(pipe: Any, name: str, **more: Any) -> Array:
    video = everyframe.run(pipe, output="float", **asked_of(name), **more)
    assert isinstance(video, everyframe.Video)
    return video.frames


def streamed(pipe: Any, name: str) -> Array:
    events = everyframe.stream(everyframe.Request(**asked_of(name)), pipe=pipe)
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


MAKERS = pytest.mark.parametrize("make", [ours, streamed])
