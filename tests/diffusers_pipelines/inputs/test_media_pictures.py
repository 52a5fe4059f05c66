"""A pipeline's own pictures, videos and numbers, given by the names of files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from everyframe.core.errors import InputError, MediaError
from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.inputs.media import (
    check,
    media_parameter_names,
    names_files,
    opened,
    size_in,
)
from everyframe.diffusers_pipelines.inputs.signature import CallSignature, declared
from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, picture, written

SETTINGS = Settings(
    prompt="a fox", negative_prompt=None, height=16, width=24, num_frames=3, fps=8,
    num_inference_steps=2, guidance_scale=1.0, seed=0, num_videos=1,
)  # fmt: skip


@dataclass
class Condition:
    """What LTX's pipelines take a list of."""

    frames: PIL.Image.Image | list[PIL.Image.Image] | torch.Tensor
    index: int = 0


ANNOTATED: dict[str, Any] = {
    "video": list[PIL.Image.Image],
    "control_video": torch.FloatTensor,
    "mask_video": torch.FloatTensor,
    "reference_images": list[PIL.Image.Image | np.ndarray] | None,
    "face_video": list[PIL.Image.Image],
    "c2w": "np.ndarray | None",
    "conditions": Condition | list[Condition] | None,
    "mode": str,
    "driving_video": None,
    "seconds": None,
}


def interface(class_name: str = "Some") -> CallSignature:
    """One with these parameters."""
    known = {name: declared(name, None, False, each) for name, each in ANNOTATED.items()}
    return CallSignature(class_name, known, makes_video=True)


@pytest.fixture
def clip(tmp_path: Path) -> str:
    """A folder of three frames, 32 wide and 32 high."""
    return str(written(Clip(3, 32), tmp_path, 0, 0))


@pytest.fixture
def still(tmp_path: Path) -> str:
    """A picture."""
    return str(written(Still(), tmp_path, 0, 0))


def test_the_form_is_read_from_the_signature() -> None:
    forms = {name: (each.form, each.is_list) for name, each in interface().parameters.items()}
    assert forms == {
        "video": ("pictures", True),
        "control_video": ("tensor", False),
        "mask_video": ("tensor", False),
        "reference_images": ("pictures", True),
        "face_video": ("pictures", True),
        "c2w": ("array", False),
        "conditions": ("", False),
        "mode": ("", False),
        "driving_video": ("pictures", False),  # by its name, as nothing is declared
        "seconds": ("", False),
    }
    assert interface().parameters["conditions"].record is Condition


def test_a_video_is_read_and_fitted_and_a_still_picture_is_not(clip: str, still: str) -> None:
    own = {"video": clip, "reference_images": [still], "face_video": clip, "mode": "replace"}
    got = opened(interface("WanAnimatePipeline"), own, SETTINGS)
    assert [each.size for each in got["video"]] == [(24, 16)] * 3
    assert [each.size for each in got["face_video"]] == [(32, 32)] * 3
    assert np.array_equal(np.asarray(got["reference_images"][0]), picture())
    assert got["mode"] == "replace"
    alone = opened(interface(), {"reference_images": still}, SETTINGS)
    assert len(alone["reference_images"]) == 1
    unfitted = opened(interface(), {"video": clip}, replace(SETTINGS, fit=None))
    assert np.array_equal(np.asarray(unfitted["video"][1]), Clip(3, 32).frames(0, 0)[1])


def test_tensors_are_in_the_order_of_that_pipeline(clip: str) -> None:
    own, as_it_is = {"control_video": clip, "mask_video": clip}, replace(SETTINGS, fit=None)
    frames = Clip(3, 32).frames(0, 0)
    got = opened(interface(), own, as_it_is)
    assert got["control_video"].shape == (1, 3, 3, 32, 32)
    assert np.array_equal(got["control_video"][0, 1].numpy() * 255, np.moveaxis(frames[1], -1, 0))
    assert got["mask_video"].shape == (1, 3, 1, 32, 32)
    assert set(got["mask_video"].unique().tolist()) == {0.0, 255.0}
    first = opened(interface("EasyAnimateInpaintPipeline"), own, as_it_is)
    assert torch.equal(first["control_video"], got["control_video"].transpose(1, 2))


def test_a_record_is_made_of_its_fields_and_numbers_of_their_file(
    tmp_path: Path, still: str
) -> None:
    track = np.eye(4, dtype=np.float32)[None]
    np.save(tmp_path / "track.npy", track)
    own = {"conditions": [{"frames": still, "index": 8}], "c2w": str(tmp_path / "track.npy")}
    got = opened(interface(), own, SETTINGS)
    (condition,) = got["conditions"]
    assert isinstance(condition, Condition)
    assert condition.index == 8
    assert np.array_equal(np.asarray(condition.frames), picture())
    assert isinstance(got["c2w"], np.ndarray)
    assert np.array_equal(got["c2w"], track)


def test_what_is_no_file_is_reported_before_anything_is_loaded(tmp_path: Path, still: str) -> None:
    known = interface().parameters
    with pytest.raises(MediaError, match=r"nowhere\.mp4' does not exist"):
        check(interface(), known["video"], "nowhere.mp4")
    with pytest.raises(InputError, match=r"conditions of Some has no field 'frame'; did you mean"):
        check(interface(), known["conditions"], [{"frame": still}])
    with pytest.raises(InputError, match="can't do without frames"):
        check(interface(), known["conditions"], {"index": 1})
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="holds no array of numbers"):
        opened(interface(), {"c2w": str(tmp_path / "objects.npy")}, SETTINGS)
    # A header that promises more than there is allocates nothing.
    with (tmp_path / "short.npy").open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**13,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InputError, match="holds no array of numbers"):
        opened(interface(), {"c2w": str(tmp_path / "short.npy")}, SETTINGS)
    assert not names_files(known["mode"], "replace")
    assert not names_files(known["video"], [PIL.Image.new("RGB", (8, 8))])


def test_length_and_size_are_those_of_the_video(clip: str) -> None:
    assert size_in(interface(), {"mode": "a", "video": clip}) == (3, 32, 32)
    assert size_in(interface(), {"mode": "a"}) is None
    assert media_parameter_names({"video": clip, "conditions": [{"frames": clip, "index": 1}]}) == {
        "video": "clip3",
        "conditions": [{"frames": "clip3", "index": 1}],
    }


def test_an_array_in_a_file_has_the_size_of_a_video(tmp_path: Path) -> None:
    """Of a pipeline that makes as many frames as it is given, in their size."""
    np.save(tmp_path / "clip.npy", np.zeros((3, 16, 32, 3), np.float32))
    assert size_in(interface(), {"video": str(tmp_path / "clip.npy")}) == (3, 16, 32)
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(InputError, match="holds no array of numbers"):
        size_in(interface(), {"video": str(tmp_path / "broken.npy")})
