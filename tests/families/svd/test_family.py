"""Which folders and names are a Stable Video Diffusion, and the errors for those that are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError
from everyframe.families.registry import family
from everyframe.families.svd.config import SVDConfig, released
from everyframe.families.svd.options import SVDOptions
from helpers.pickled_weights import pickle_weights
from helpers.tiny_checkpoints import svd as tiny_svd

PICTURE = np.zeros((32, 32, 3), np.uint8)
SMALL: dict[str, Any] = {"size": "32x32", "num_frames": 2, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("svd")


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [pytest.param("svd", 14, marks=pytest.mark.slow), ("svd-xt", 25), ("svd-xt-1.1", 25)],
)
def test_a_known_model_is_planned_before_it_is_fetched(name: str, num_frames: int) -> None:
    plan = everyframe.plan(model=name, image=PICTURE)
    assert (plan.family, plan.settings.num_frames) == ("svd", num_frames)
    assert len(plan.downloads) == 3
    # The table's numbers are those of the modules that would be built.
    place = locate(name)
    assert place.known is not None
    listed = {part.role: part.num_parameters for part in place.known.parts}
    counted = {part.name: part.num_parameters for part in plan.components}
    assert listed == {"denoiser": counted.pop("unet"), **counted}


def test_a_hub_id_is_the_known_model() -> None:
    assert locate("stabilityai/stable-video-diffusion-img2vid").name == "svd"


def test_single_files_beside_a_pipeline_do_not_confuse(folder: Path) -> None:
    """The released repositories hold Stability's own files at the top."""
    for name in ("svd.safetensors", "svd_image_decoder.safetensors"):
        save_file({"x": load_file(folder / "vae/diffusion_pytorch_model.safetensors").popitem()[1]},
                  folder / name)  # fmt: skip
    assert everyframe.plan(model=str(folder), image=PICTURE, **SMALL).family == "svd"


@pytest.mark.parametrize("index", [None, {"_class_name": "StableDiffusionPipeline"}])
def test_other_folders_are_left_to_others(
    folder: Path, tmp_path: Path, index: dict[str, str] | None
) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        (folder / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    )
    if index is not None:
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert family("svd").recognise(locate(str(tmp_path)), SVDOptions()) is None


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tiny_svd.svd(tmp_path / "broken")
    file = copy / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors.pop("conv_out.bias")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: 'conv_out.bias'"):
        everyframe.generate(model=str(copy), image=PICTURE, **SMALL)


@pytest.mark.parametrize("part", ["unet", "vae", "image_encoder"])
def test_pickled_weights_are_refused(folder: Path, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "pickled")
    pickle_weights(copy / part)
    with pytest.raises(CheckpointError, match=rf"weights of its {part} are pickled \(.*\.bin\)"):
        everyframe.plan(model=str(copy), image=PICTURE, **SMALL)


@pytest.mark.parametrize(
    ("part", "name", "value", "text"),
    [
        ("scheduler", "prediction_type", "epsilon", "has prediction_type 'epsilon'; only 'v_pred"),
        ("scheduler", "use_karras_sigmas", False, "has use_karras_sigmas False"),
        ("scheduler", "sigma_max", None, "has no sigma_max"),
        ("scheduler", "sigma_min", -1.0, "scheduler: its sigma_min must be positive, got -1.0"),
        ("scheduler", "sigma_max", float("nan"), "its sigma_max must be positive, got nan"),
        ("vae", "scaling_factor", [[]], r"vae: its scaling_factor must be positive, got \[\[\]\]"),
        ("vae", "scaling_factor", 0, "its scaling_factor must be positive, got 0"),
        ("feature_extractor", "image_std", [1, None, 1], r"image_std must be positive, got \[1"),
        ("feature_extractor", "image_mean", [0.5], "image_mean must be of three colours"),
        ("scheduler", "_class_name", "DDIMScheduler", "of class 'DDIMScheduler', expected Euler"),
        ("unet", "_class_name", "UNet3DConditionModel", "the unet is of class"),
        ("unet", "in_channels", 9, "takes 9 channels and the autoencoder gives 4"),
        ("image_encoder", "projection_dim", 77, "gives 77 channels and the denoiser takes 1024"),
    ],
)
def test_configs_that_can_not_be_run(part: str, name: str, value: Any, text: str) -> None:
    changed = {**released(), part: {**released()[part], name: value}}
    with pytest.raises(CheckpointError, match=text):
        SVDConfig.from_json("here", changed)
