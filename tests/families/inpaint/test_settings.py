"""Requests resolved against an inpainting model: notes about sizes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.core.errors import InputError
from everyframe.media.write import write

SOURCE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
VIDEO = np.stack([SOURCE] * 3)
WHITE = np.full((24, 32), 255, np.uint8)
GOOD: dict[str, Any] = {"source": SOURCE, "mask": WHITE, "control": "canny", "seed": 1}


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("inpaint")


def planned(folder: Path, **changed: Any) -> everyframe.Plan:
    given = {"prompt": "a red ball", **GOOD, **changed}
    kept = {name: value for name, value in given.items() if value is not None}
    return everyframe.plan(model=str(folder), **kept)


def test_defaults_are_those_of_diffusers(folder: Path) -> None:
    settings = planned(folder).settings
    assert (settings.num_inference_steps, settings.guidance_scale) == (50, 7.5)
    assert (settings.width, settings.height, settings.num_frames) == (32, 24, 1)
    assert settings.option("controlnet_conditioning_scale") == 0.5
    assert settings.option("strength") == 1


def test_a_plan_says_what_is_done_to_sizes_and_steps(folder: Path) -> None:
    notes = " ".join(planned(folder, source=SOURCE[:21], mask=WHITE[:21]).notes)
    assert "32x21 is padded to 32x24" in notes
    assert "the result cut back" in notes
    assert planned(folder).notes == ()
    notes = " ".join(planned(folder, size="64x64", fit="pad").notes)
    assert "the source is 32x24 and is padded to the proportions of 64x64" in notes
    assert "source is 32x24 and is resized" in " ".join(planned(folder, size="64x48").notes)
    # PNDM makes its second step twice.
    notes = " ".join(planned(folder, strength=0.5, num_inference_steps=8).notes)
    assert "strength 0.5: 5 of 8 steps are done" in notes
    notes = " ".join(planned(folder, control=np.zeros((30, 20), np.uint8)).notes)
    assert "is 20x30 and is stretched to the source's 32x24" in notes


def test_a_video_keeps_its_rate_and_length(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "clip.mp4", [VIDEO], 12)
    settings = planned(folder, source=str(file)).settings
    assert (settings.fps, settings.num_frames) == (12, 3)
    assert planned(folder, source=str(file), num_frames=2).settings.num_frames == 2
    assert "not play at its own speed" in " ".join(planned(folder, source=str(file), fps=6).notes)
    frames = write(tmp_path / "frames/", [VIDEO], 12)
    assert planned(folder, source=str(frames)).settings.fps == 12
    (frames / "record.json").unlink()
    plan = planned(folder, source=str(frames), mask="0,0,8,8")
    assert plan.settings.fps == 24
    assert "tells no frame rate" in " ".join(plan.notes)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"source": None}, r"repaints a part of a picture or video; give it \(source\)"),
        ({"image": SOURCE}, "image and source both say what is repainted"),
        ({"mask": None}, "there is no mask"),
        ({"control": None}, "nothing for the ControlNet to see"),
        ({"prompt": None}, "needs a prompt"),
        ({"mask": WHITE[:16]}, "the mask is 32x16 and the source 32x24"),
        ({"mask": WHITE * 0}, "the mask is empty"),
        ({"mask": np.full((24, 32), 127, np.uint8)}, "the mask is empty"),
        ({"source": VIDEO, "mask": np.stack([WHITE] * 2)}, "mask has 2 frames and the source 3"),
        ({"mask": "8,8,40,20"}, "the box 8,8,40,20 reaches out of the source, which is 32x24"),
        ({"mask": (-1, 0, 4, 4)}, "reaches out of the source"),
        ({"mask": "20,8,10,20"}, "the box 20,8,10,20 is empty: right must be more than left"),
        ({"mask": "8,8,20"}, r"a box is LEFT,TOP,RIGHT,BOTTOM .* got '8,8,20'"),
        ({"mask": (1.5, 0, 4, 4)}, "a box is LEFT,TOP,RIGHT,BOTTOM in whole pixels"),
        ({"mask": "nowhere.png"}, r"mask: 'nowhere.png' does not exist; give .* or a box"),
        ({"source": "nowhere.mp4"}, "source: 'nowhere.mp4' does not exist"),
        ({"control": "cany"}, "'cany' does not exist; give a picture, .* or canny or inpaint"),
        ({"control": VIDEO}, "has 3 frames and the source 1"),
        ({"control": "canny,inpaint"}, "there are 1 ControlNets and 2 controls"),
        ({"controlnet_conditioning_scale": "0.5,1"}, "has 2 values for 1 ControlNets"),
        ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "must be at least 0 and"),
        ({"strength": 0.01, "num_inference_steps": 20}, "leaves none to be done; raise strength"),
        ({"strength": 0}, "strength must be more than 0"),
        ({"num_frames": 2}, "2 frames were asked for and the source has 1; it is one picture"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt has no effect"),
        ({"fit": "squash"}, "fit must be one of crop, pad, stretch"),
        ({"extend": "a.mp4"}, "extend has no effect on .*: give what is repainted as source"),
        ({"edit_strength": 0.5}, "edit_strength has no effect on .*: give strength"),
        ({"canny_low": 5.0, "control": SOURCE}, "canny_low has no effect"),
        ({"latents": np.zeros((1, 4, 2, 2))}, r"latents must be .* \(1, 4, 3, 4\)"),
        ({"controlnet": "cany"}, "controlnet must be a folder, .* got 'cany'; did you mean 'cann"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_had_is_one_line(folder: Path, changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        planned(folder, **changed)
    assert "\n" not in str(caught.value)


def test_an_animated_picture_is_no_single_one(folder: Path, tmp_path: Path) -> None:
    file = str(write(tmp_path / "clip.gif", [np.stack([SOURCE, 255 - SOURCE])], 10))
    with pytest.raises(InputError, match=r"clip.gif' has 2 frames; give it as source"):
        planned(folder, source=None, image=file)
    assert planned(folder, source=file).settings.num_frames == 2


def test_a_video_that_breaks_off_is_reported_before_it_runs(folder: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), np.uint8)
    whole = bytearray(write(tmp_path / "clip.mp4", [noise], 12).read_bytes())
    start = whole.find(b"mdat") + len(whole) // 2
    whole[start : start + len(whole) // 4] = bytes(len(whole) // 4)
    (tmp_path / "clip.mp4").write_bytes(whole)
    with pytest.raises(InputError, match=r"frame \d+ can't be decoded"):
        planned(folder, source=str(tmp_path / "clip.mp4"), mask="0,0,8,8")


def test_frames_of_a_folder_must_be_of_one_size(folder: Path, tmp_path: Path) -> None:
    for number, side in enumerate((16, 24)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{number}.jpg")
    with pytest.raises(InputError, match="frame 0 is 16x16, frame 1 is 24x24"):
        planned(folder, source=str(tmp_path), mask="0,0,8,8")


def test_what_is_transparent_in_a_mask_is_kept(folder: Path) -> None:
    clear = Image.new("RGBA", (32, 24), (255, 255, 255, 0))
    with pytest.raises(InputError, match="the mask is empty"):
        planned(folder, mask=clear)
