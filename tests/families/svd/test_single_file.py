"""Stability's single files give the frames of the diffusers folder that they were made from."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError
from everyframe.families.registry import family
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.single_file import frames_by_name
from helpers.forked_process import forked
from helpers.tiny_checkpoints import svd as tiny_svd
from helpers.tiny_checkpoints import svd_single_file

PICTURE = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
SMALL: dict[str, Any] = {
    "size": "48x32", "num_frames": 2, "num_inference_steps": 2, "seed": 1, "output": "float",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny-svd"
    return tiny_svd.svd(place, heads_as_released=True)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return svd_single_file.write(folder, folder.parent / "svd_xt.safetensors")


@pytest.fixture(scope="module")
def of_the_folder(folder: Path) -> np.ndarray[Any, Any]:
    return frames(folder)


def frames(model: Path, **changed: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(model=str(model), image=PICTURE, **{**SMALL, **changed})
    assert isinstance(video, everyframe.Video)
    return video.frames


def changed(file: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with tensors replaced, or left out; ``__`` stands for a dot."""
    left = load_file(file)
    for name, tensor in tensors.items():
        real = name.replace("__", ".")
        left.pop(real, None)
        if tensor is not None:
            left[real] = tensor
    save_file(left, target)
    return target


def test_frames_are_those_of_the_folder(file: Path, of_the_folder: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(frames(file), of_the_folder)


@pytest.mark.slow
def test_a_decoder_of_single_pictures(tmp_path: Path) -> None:
    folder = tiny_svd.svd(tmp_path / "tiny", image_vae=True, heads_as_released=True)
    file = svd_single_file.write(folder, tmp_path / "svd_image_decoder.safetensors")
    assert np.array_equal(frames(file), frames(folder))


@pytest.mark.slow
def test_half_precision_files_load(
    folder: Path, of_the_folder: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    narrow = svd_single_file.write(folder, tmp_path / "svd-fp16.safetensors", torch.float16)
    plan = everyframe.plan(model=str(narrow), image=PICTURE)
    assert {part.precision.parameters for part in plan.components} == {"float32"}
    # Weights rounded to 11 bits, everything else as before: close, and not the same.
    difference = np.abs(frames(narrow) - of_the_folder)
    assert difference.max() > 0
    assert difference.mean() < 0.01


def test_one_file_in_a_folder_of_its_own(file: Path) -> None:
    found = family("svd").recognise(locate(str(file.parent)), SVDOptions())
    assert found is not None
    assert found.weight_files() == (str(file),)


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [
        ("svd", 14), ("svd_xt", 25), ("svd_xt_1_1", 25), ("SVD-XT.fp16", 25),
        ("svd_image_decoder", 14), ("svd_xt_image_decoder", 25), ("next", 14),
    ],
)  # fmt: skip
def test_the_number_of_frames_follows_from_the_name(name: str, num_frames: int) -> None:
    assert frames_by_name(name) == num_frames


def test_what_is_assumed_is_reported_and_recorded(file: Path) -> None:
    plan = everyframe.plan(model=str(file), image=PICTURE)
    assert plan.settings.num_frames == 25
    assert "does not tell whether it was trained on 14 or 25 frames" in " ".join(plan.notes)
    assert plan.title.endswith("taken for the model of 25 frames")
    planned = everyframe.plan(model=str(file), image=PICTURE, num_frames=14)
    assert "does not tell" not in " ".join(planned.notes)


NORM = "model__diffusion_model__input_blocks__1__0__in_layers__0__bias"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({NORM: None}, r"lacks 1 tensor: 'down_blocks.0.resnets.0.spatial_res_block.norm1.bias'"),
        ({NORM: torch.zeros(65)}, r"blocks.1.0.in_layers.0.bias' has shape \(65,\), expected"),
        ({"model__other": torch.zeros(1)}, r"has 1 tensor too many: 'model.other'"),
        ({"first_stage_model__decoder__conv_in__weight": None}, "lacks 'first_stage_model.decoder"),
        ({"first_stage_model__decoder__mid__attn_1__q__weight": torch.zeros(32, 32, 3, 3)},
         "expected a kernel of one position"),
        ({"model__diffusion_model__label_emb__0__0__weight": torch.zeros(256, 1280)}, "SV3D?"),
    ],
)  # fmt: skip
def test_other_tensors_are_named(
    file: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], text: str
) -> None:
    broken = changed(file, tmp_path / "svd.safetensors", **tensors)
    with pytest.raises(CheckpointError, match=text):
        frames(broken)


def test_a_truncated_file_is_reported_as_such(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "svd.safetensors"
    short.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        everyframe.plan(model=str(short), image=PICTURE)


def test_a_pickle_of_it_is_refused_with_how_it_is_converted(file: Path, tmp_path: Path) -> None:
    state = load_file(file)
    path = tmp_path / "an other.ckpt"
    torch.save({"state_dict": state}, path)
    match = r"its weights are pickled \(an other.ckpt\)"
    with pytest.raises(CheckpointError, match=match) as refused:
        everyframe.plan(model=str(path), image=np.zeros((16, 16, 3), np.uint8))
    command = str(refused.value).partition("convert them once: ")[2].partition(" writes ")[0]
    assert shlex.split(command)[3:] == [str(path), "an other.safetensors"]
    script = command.partition('python -c "')[2].partition('"')[0]
    target = tmp_path / "made.safetensors"

    def program() -> None:
        sys.argv = ["-c", str(path), str(target)]
        exec(script, {"__name__": "__main__"})

    done = forked(program, tmp_path, os.environ, stderr=subprocess.PIPE)
    _, printed = done.communicate(timeout=300)
    assert done.returncode == 0, printed
    made = load_file(target)
    assert made.keys() == state.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in state.items())


def test_other_files_are_left_to_others(folder: Path) -> None:
    vae = folder / "vae/diffusion_pytorch_model.safetensors"
    assert family("svd").recognise(locate(str(vae)), SVDOptions()) is None


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [
        ("svd-image-decoder", 14),
        pytest.param("svd-xt-image-decoder", 25, marks=pytest.mark.slow),  # of the same parts
    ],
)
def test_the_released_single_files_are_planned_before_they_are_fetched(
    name: str, num_frames: int
) -> None:
    plan = everyframe.plan(model=name, image=PICTURE)
    assert plan.settings.num_frames == num_frames
    assert plan.downloads[0].endswith("_image_decoder.safetensors, about 9.5 GB")
    vae = plan.component("vae")
    assert vae.num_parameters == 83_653_863  # AutoencoderKL's, as published for sd-vae-ft-ema
