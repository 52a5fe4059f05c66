"""The plan refuses what is no picture or video, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.core.errors import MediaError
from everyframe.core.request import Request
from everyframe.media.frame_source import check_given


@pytest.fixture
def files(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "still.png")
    moving = {"save_all": True, "append_images": [Image.fromarray(255 - pixels)], "duration": 100}
    picture.save(tmp_path / "moving.gif", **moving)
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "cut.png").write_bytes((tmp_path / "still.png").read_bytes()[:1500])
    return tmp_path


@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("image", "text.png", "is no picture that can be read"),
        ("image", "cut.png", "to its end"),
        ("image", "moving.gif", "an animated picture of 2 frames"),
        ("last_image", "missing.png", "does not exist"),
        ("extend", "text.mp4", "can't be read as a video"),
        ("extend", "missing.mp4", "does not exist"),
    ],
)
def test_what_is_none_is_reported(files: Path, option: str, name: str, says: str) -> None:
    asked: dict[str, Any] = {option: str(files / name)}
    with pytest.raises(MediaError, match=says):
        check_given(Request(prompt="a red circle", model="shapes", **asked))
    with pytest.raises(MediaError, match=says):
        everyframe.plan("a red circle", model="shapes", **asked)


def test_what_is_one_goes_by(files: Path) -> None:
    still = files / "still.png"
    check_given(Request(prompt="a red circle"))
    check_given(
        Request(prompt="a red circle", image=still, last_image=np.zeros((4, 4, 3), np.uint8))
    )
    check_given(Request(prompt="a red circle", extend=files / "moving.gif"))
    check_given(Request(prompt="a red circle", extend=np.zeros((2, 4, 4, 3), np.uint8)))
