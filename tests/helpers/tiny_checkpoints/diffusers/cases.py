"""Case of a pipeline class: how its tiny checkpoint is made, and the request of its test.

The checkpoints are in the modules beside this one, by family. The comparison is in
`tests/end_to_end/test_every_pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PROMPT = "a red fox runs"
STEPS, SEED = 2, 3


@dataclass(frozen=True)
class Clip:
    """A video of so many frames, given by the name of a folder of pictures.

    Each is as large as what is asked for, or as `side` says.
    """

    num_frames: int
    side: int | None = None

    def frames(self, height: int, width: int) -> np.ndarray[Any, Any]:
        """Noise, uint8 (T, H, W, 3)."""
        size = (height, width) if self.side is None else (self.side, self.side)
        noise = np.random.default_rng(1).random((self.num_frames, *size, 3))
        return (noise * 255).astype(np.uint8)


@dataclass(frozen=True)
class Still:
    """A picture, given by the name of its file."""


@dataclass(frozen=True)
class Case:
    """A pipeline of `class_name`; `asked` holds options of ours, and `option` its own parameters.

    `made` is its number of steps, where that is not what was asked for, and None where it depends
    on more; `sound` whether it makes sound; it is made and run `within` that.
    """

    class_name: str
    build: Callable[[], Any]
    asked: Mapping[str, Any]
    made: int | None = STEPS
    sound: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


CASES: dict[str, Case] = {}


def case(
    class_name: str,
    *,
    made: int | None = STEPS,
    sound: bool = False,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **asked: Any,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Mark a function as the one that makes a tiny pipeline of that class."""

    def marked(build: Callable[[], Any]) -> Callable[[], Any]:
        assert class_name not in CASES, f"{class_name} is made twice"
        CASES[class_name] = Case(class_name, build, asked, made, sound, within)
        return build

    return marked


def picture(height: int = 20, width: int = 24) -> np.ndarray[Any, Any]:
    """A picture of noise, uint8."""
    return (np.random.default_rng(0).random((height, width, 3)) * 255).astype(np.uint8)


def written(value: Any, folder: Path, height: int, width: int) -> Any:
    """The same with each `Clip` and `Still` written into `folder` and named by its path."""
    if isinstance(value, Mapping):
        return {key: written(each, folder, height, width) for key, each in value.items()}
    if isinstance(value, list):
        return [written(each, folder, height, width) for each in value]
    if isinstance(value, Still):
        Image.fromarray(picture()).save(folder / "still.png")
        return str(folder / "still.png")
    if isinstance(value, Clip):
        place = folder / f"clip{value.num_frames}"
        place.mkdir(exist_ok=True)
        for number, frame in enumerate(value.frames(height, width)):
            Image.fromarray(frame).save(place / f"{number:05d}.png")
        return str(place)
    return value


def as_python(value: Any, height: int, width: int) -> Any:
    """The same with each `Clip` and `Still` as somebody would give it in Python, for Pillow."""
    if isinstance(value, Mapping):
        return {key: as_python(each, height, width) for key, each in value.items()}
    if isinstance(value, list):
        return [as_python(each, height, width) for each in value]
    if isinstance(value, Still):
        return Image.fromarray(picture())
    if isinstance(value, Clip):
        return [Image.fromarray(frame) for frame in value.frames(height, width)]
    return value
