"""`everyframe generate` and `plan` with an inpainting model: files in, files out, and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.cli.main import main
from everyframe.media.read import read_image, read_video
from everyframe.media.record import read_record
from everyframe.media.write import write

SOURCE = np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("inpaint")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a picture, a mask and a folder of frames in it."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(SOURCE[0]).save("source.png")
    mask = np.zeros((24, 32), np.uint8)
    mask[6:18, 8:24] = 255
    Image.fromarray(mask).save("mask.png")
    write("clip/", [SOURCE], 12)
    return tmp_path


def run(model: Path, words: str) -> int:
    return main([*words.split(), "--prompt", "a red ball", "--model", str(model), "--steps", "1"])


def test_a_picture_becomes_a_picture_and_again(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "generate --source source.png --mask mask.png --control canny,source.png --seed 3"
    assert run(model, words) == 2
    assert "there are 1 ControlNets and 2 controls" in capsys.readouterr().err
    assert run(model, words.replace(",source.png", "")) == 0
    path = capsys.readouterr().out.strip()
    assert path.endswith("_a-red-ball_3.png")
    made, source = read_image(path), SOURCE[0]
    inside = read_image("mask.png")[..., 0] > 0
    assert np.array_equal(made[~inside], source[~inside])
    assert not np.array_equal(made[inside], source[inside])
    record = read_record(path)
    assert str(folder) not in json.dumps(record)
    assert record["request"]["mask"]["file"] == "mask.png"
    assert main(["generate", "--from", path, "--model", str(model), "-o", "again.png"]) == 0
    assert np.array_equal(read_image("again.png"), made)
    Image.new("L", (32, 24), 255).save("mask.png")
    capsys.readouterr()
    assert main(["generate", "--from", path, "--model", str(model), "-o", "again.png"]) == 2
    assert "'mask.png' in this folder is not the file" in capsys.readouterr().err


def test_a_folder_of_frames_becomes_a_video(model: Path) -> None:
    words = "generate --source clip --mask 8,6,24,18 --control clip --seed 3 -o out.mp4"
    assert run(model, words) == 0
    frames, fps = read_video("out.mp4")
    assert (frames.shape, fps) == ((3, 24, 32, 3), 12)
    request = read_record("out.mp4")["request"]
    assert (request["mask"], request["source"]["file"]) == ("8,6,24,18", "clip")
    # A record of a video holds the folder's pictures by their hash.
    again = everyframe.generate(from_record="out.mp4", model=str(model))
    assert isinstance(again, everyframe.Video)
    assert np.array_equal(again.frames[:, 0], SOURCE[:, 0])


def test_a_plan_loads_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--source clip --mask mask.png --control inpaint --strength 1 --fps 8"
    assert run(model, f"plan {words}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "32x24, 3 frames at 8 fps" in shown
    assert "the source has 12 frames a second and the result 8" in shown
    assert "source clip, mask mask.png, control inpaint" in shown
    assert run(model, f"generate {words} --dry-run -o out.png") == 2
    assert "can hold one frame, and 3 are to be written" in capsys.readouterr().err
