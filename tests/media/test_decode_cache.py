"""Files are decoded once, as long as they are the same, and what is held is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everyframe.media import decode_cache, mp4
from everyframe.media.pixels import Frames
from everyframe.media.read import read_image, read_pixels, video_shape
from everyframe.media.video import Video


@pytest.fixture(autouse=True)
def _is_empty() -> Iterator[None]:
    decode_cache._frames.clear()
    yield
    decode_cache._frames.clear()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Video files that were decoded, in order."""
    names: list[str] = []
    iter_frames = mp4.iter_frames

    def counted(path: Path) -> Iterator[Frames]:
        names.append(path.name)
        return iter_frames(path)

    monkeypatch.setattr(mp4, "iter_frames", counted)
    return names


def clip_of_three(folder: Path) -> Path:
    """A video of three frames of 32x32."""
    frames = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), np.uint8)
    return Video(frames, 8, {}).save(folder / "a.mp4")


def test_a_video_is_decoded_once_for_its_size_and_its_frames(
    tmp_path: Path, decoded: list[str]
) -> None:
    clip = clip_of_three(tmp_path)
    assert video_shape(clip) == (3, 32, 32)
    first, second = read_pixels(clip), read_pixels(clip)
    assert len(decoded) == 1
    assert np.array_equal(first, second)
    first[:] = 0
    assert np.array_equal(read_pixels(clip), second), "each caller has its own"
    assert video_shape(clip) == (3, 32, 32)
    assert len(decoded) == 1


def test_what_is_too_large_is_not_held(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_cache, "_MOST_BYTES", 2 * 32 * 32 * 3)
    clip = clip_of_three(tmp_path)
    assert video_shape(clip) == (3, 32, 32)
    read_pixels(clip)
    assert len(decoded) == 2
    assert not decode_cache._frames
    for number in range(3):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (32, 32)).save(path)
        read_image(path)
    assert len(decode_cache._frames) == 2


def test_a_file_that_was_written_since_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for colour in (10, 20):
        Image.new("RGB", (4, 4), (colour, 0, 0)).save(path)
        os.utime(path, ns=(colour, colour))
        assert read_image(path)[0, 0, 0] == colour
    read_pixels(tmp_path)
    assert read_pixels(tmp_path)[0, 0, 0, 0] == 20
    Image.new("RGB", (4, 4), (30, 0, 0)).save(path)
    assert read_pixels(tmp_path)[0, 0, 0, 0] == 30, "of a folder each file counts"
    assert read_image(path)[0, 0, 0] == 30
    at = path.stat().st_mtime_ns
    Image.new("RGB", (4, 4), (40, 0, 0)).save(path)
    os.utime(path, ns=(at, at))
    assert read_image(path)[0, 0, 0] == 40, "a copy keeps the time of what was copied"
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.save(path)
    assert (read_image(path).max(), read_image(path, under="black").max()) == (255, 0)
