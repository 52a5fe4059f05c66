"""Videos of the gallery are small and shown, and their commands make them again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from everyframe.cli.main import main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^everyframe generate .*$", PAGE, re.MULTILINE)
VIDEOS = sorted((ROOT / "docs" / "gallery").glob("*.gif"))


def frames_of(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        found = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]
    return np.stack(found).astype(np.float32)


@pytest.mark.parametrize("path", VIDEOS, ids=lambda path: path.stem)
def test_a_video_is_small_and_shown_with_its_command(path: Path) -> None:
    assert path.stat().st_size < 200_000
    assert f"(gallery/{path.name})" in PAGE
    assert any(command.endswith(f"-o {path.name}") for command in COMMANDS)
    assert path.with_suffix(".json").is_file()


def test_there_are_videos() -> None:
    assert len(VIDEOS) == len(COMMANDS) > 2


@pytest.mark.slow  # a video each
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[-1])
def test_a_command_makes_its_video_again(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, as it is another machine: a level of colour on average, and its palette."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    assert main(words) == 0
    made, kept = frames_of(tmp_path / words[-1]), frames_of(ROOT / "docs" / "gallery" / words[-1])
    assert made.shape == kept.shape
    assert np.abs(made - kept).mean() < 4
