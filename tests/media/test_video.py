"""The value that generating gives back."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from everyframe.core.errors import InputError, NumericsError
from everyframe.media.video import Video

FLOATS = np.random.default_rng(0).random((20, 16, 24, 3), dtype=np.float32)


def test_says_what_it_is() -> None:
    video = Video(FLOATS, Fraction(24000, 1001))
    assert video.fps == Fraction(24000, 1001)
    assert (video.num_frames, video.height, video.width) == (20, 16, 24)
    assert repr(video) == "<Video: 20 frames of 24x16, 24000/1001 fps, 0.83 s, float32>"


def test_saves_floats_rounded_and_loads_them_with_the_record(tmp_path: Path) -> None:
    path = Video(FLOATS, Fraction(12), {"seed": 7}).save(f"{tmp_path}/clip/")
    loaded = Video.load(path)
    assert np.array_equal(loaded.frames, np.rint(FLOATS * 255).astype(np.uint8))
    assert loaded.fps == 12
    assert loaded.record["seed"] == 7


def test_non_finite_frames_are_never_written(tmp_path: Path) -> None:
    frames = FLOATS.copy()
    frames[18, 3, 3, 1] = np.nan
    for name in ("clip.mp4", "clip.gif", "clip.webp", "clip/"):
        with pytest.raises(NumericsError, match="frame 18 "):
            Video(frames, Fraction(12)).save(f"{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())


def test_other_shapes_and_types_are_refused() -> None:
    for bad in (FLOATS[0], FLOATS[..., :1], FLOATS[:0], FLOATS.astype(np.float64)):
        with pytest.raises(InputError, match="frames must be"):
            Video(bad, Fraction(24))
