"""Frames one after the other, from whatever holds them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import InputError, MediaError
from everyframe.media.frame_source import open_frames, picture_files, survey
from everyframe.media.read import read_video
from everyframe.media.write import write

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 48, 64, 3), np.uint8)


def read(given: Any) -> np.ndarray[Any, Any]:
    return np.stack(list(open_frames(given, what="source").read()))


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "clip/"])
def test_frames_are_those_that_are_read_at_once(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [FRAMES], 12)
    whole, fps = read_video(path)
    source = open_frames(str(path), what="source")
    assert (source.fps, source.is_still, source.name) == (fps, False, path.name)
    # As often as wanted, from the beginning each time.
    for _ in range(2):
        assert np.array_equal(np.stack(list(source.read())), whole)
    found = survey(source, "source")
    assert (found.num_frames, found.height, found.width) == (5, 48, 64)


@pytest.mark.parametrize("given", [FRAMES, list(FRAMES), [Image.fromarray(f) for f in FRAMES]])
def test_frames_in_memory(given: Any) -> None:
    assert np.array_equal(read(given), FRAMES)


@pytest.mark.parametrize("given", [FRAMES[0], Image.fromarray(FRAMES[0])])
def test_one_picture_is_still(given: Any) -> None:
    assert open_frames(given, what="source").is_still
    assert np.array_equal(read(given), FRAMES[:1])


def test_a_still_picture_in_a_moving_format_is_still(tmp_path: Path) -> None:
    Image.fromarray(FRAMES[0]).save(tmp_path / "one.gif")
    assert open_frames(tmp_path / "one.gif", what="source").is_still


def test_a_long_video_is_never_held_whole(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (60, 96, 128, 3), np.uint8)
    source = open_frames(write(tmp_path / "clip.mp4", [frames], 24), what="source")
    tracemalloc.start()
    assert survey(source, "source").num_frames == 60
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A few frames of 37 kB, of 2.2 MB in all.
    assert peak < frames.nbytes / 8


def test_pictures_come_in_their_own_order(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "notes.txt"):
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="png")
    assert [path.name for path in picture_files(tmp_path)] == ["a.PNG", "b.jpg"]
    # Our own numbering counts past its digits, and alone where it is there.
    for number in (99999, 100000, 8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"frame_{number:05}.png")
    names = [path.stem for path in picture_files(tmp_path)]
    assert names == ["frame_00008", "frame_99999", "frame_100000"]


def test_what_can_not_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video")
    for given, text in (
        (tmp_path / "empty", "holds no pictures; endings that are read"),
        (tmp_path / "gone.mp4", "gone.mp4' does not exist"),
        (tmp_path / "text.mp4", "can't be read as a video"),
        ([], "source holds no frames"),
    ):
        with pytest.raises(MediaError, match=text) as caught:
            read(given)
        assert "\n" not in str(caught.value)
    with pytest.raises(MediaError, match="frame 0 is 64x48, frame 1 is 32x48"):
        survey(open_frames([FRAMES[0], FRAMES[0][:, :32]], what="source"), "source")


def test_an_open_animation_is_asked_for_by_its_path(tmp_path: Path) -> None:
    write(tmp_path / "clip.gif", [FRAMES], 10)
    refused = pytest.raises(InputError, match="of 5 frames; give the path of its file")
    with Image.open(tmp_path / "clip.gif") as moving, refused:
        open_frames(moving, what="source")
