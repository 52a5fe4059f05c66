"""Tiny checkpoints of every family and pipeline by name, and the request of each.

They are for tests that all models share. Read next: `opensora.py`, `pipelines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import opensora2 as tiny_opensora2
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo
from helpers.tiny_checkpoints import svd as tiny_svd

#: Noise, so that nothing about it is of one colour.
PICTURE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
MASK = np.zeros((32, 32), np.uint8)
MASK[8:24, 8:24] = 255

_WITH_CODE: Mapping[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "opensora-1.0": (
        lambda folder: tiny_opensora.opensora_1_0(folder).parent,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 3},
    ),
    "opensora-1.2": (
        tiny_opensora.opensora_1_2, {"prompt": "a red circle", "size": "32x32", "num_frames": 5}
    ),
    "opensora2": (
        tiny_opensora2.opensora2,
        {"prompt": "a red circle", "image": PICTURE, "size": "32x32", "num_frames": 9},
    ),
    "opensora2-dcae": (
        tiny_opensora2.opensora2_dcae,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 8},
    ),
    "svd": (tiny_svd.svd, {"image": PICTURE, "size": "32x32", "num_frames": 4}),
    "inpaint": (
        tiny_inpaint.inpaint,
        {"prompt": "a red ball", "image": PICTURE, "mask": MASK, "control": "canny"},
    ),
    "stepvideo": (
        tiny_stepvideo.stepvideo, {"prompt": "a red circle", "size": "32x16", "num_frames": 1}
    ),
}  # fmt: skip

#: Our own families, and each version that has layers of its own.
OURS = tuple(_WITH_CODE)
#: All there are: ours, then diffusers' pipelines.
NAMES = (*OURS, *tiny_pipelines.TINY)


def made(name: str, folder: Path) -> Path:
    """That checkpoint in a folder of its name in `folder`; written once."""
    make = _WITH_CODE[name][0] if name in _WITH_CODE else tiny_pipelines.TINY[name]
    return written(make, folder / name)


def written(make: Callable[[Path], object], place: Path) -> Path:
    """The checkpoint that `make` writes there; written once."""
    if not place.exists():
        make(place)
    return place


def asked(name: str, **more: Any) -> dict[str, Any]:
    """What it is asked for, with a seed and two steps."""
    if name in _WITH_CODE:
        own = _WITH_CODE[name][1]
    else:
        own = {"prompt": "a red fox runs", **tiny_pipelines.CALLS[name]}
        if "picture" in name:
            own["image"] = PICTURE
    return {"num_inference_steps": 2, "seed": 3, **own, **more}
