"""Which folders and names are inpainting models, and the errors for those that are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.inpaint.config import InpaintConfig, released
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.registry import family
from helpers.pickled_weights import pickle_weights
from helpers.slow_rows import slow_unless

GIVEN: dict[str, Any] = {
    "prompt": "a red ball", "source": np.zeros((16, 16, 3), np.uint8), "mask": "0,0,8,8",
    "control": "canny", "num_inference_steps": 1, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("inpaint")


@pytest.mark.parametrize("name", slow_unless(["sd-1.5-inpaint"], ["sd-1.5", "sd-1.5-inpaint"]))
def test_a_known_model_is_planned_before_it_is_fetched(name: str) -> None:
    plan = everyframe.plan(model=name, **GIVEN)
    assert plan.family == "inpaint"
    assert len(plan.downloads) == 4
    # The table's numbers are those of the modules that would be built.
    place = locate(name)
    assert place.known is not None
    listed = {part.role: part.num_parameters for part in place.known.parts}
    counted = {part.name: part.num_parameters for part in plan.components}
    assert listed == {"denoiser": counted.pop("unet"), **counted}
    # ControlNet and UNet are in memory together.
    unet, net = plan.component("unet"), plan.component("controlnet")
    assert plan.peak_bytes >= unet.weight_bytes + net.weight_bytes


def test_another_controlnet_by_name(folder: Path) -> None:
    plan = everyframe.plan(model=str(folder), controlnet="canny", **GIVEN)
    assert plan.component("controlnet").source == "lllyasviel/control_v11p_sd15_canny"
    assert "control_v11p_sd15_canny: config.json" in plan.downloads[0]


def test_a_base_model_takes_a_controlnet_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    base = shutil.copytree(folder, tmp_path / "base")
    net = shutil.move(base / "controlnet", tmp_path / "net")
    index = json.loads((base / "model_index.json").read_text())
    index["_class_name"] = "StableDiffusionInpaintPipeline"
    del index["controlnet"]
    (base / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"StableDiffusionInpaintPipeline, .* name a Contr"):
        everyframe.plan(model=str(base), **GIVEN)
    made = everyframe.generate(model=str(base), controlnet=str(net), **GIVEN)
    whole = everyframe.generate(model=str(folder), **GIVEN)
    assert np.array_equal(made.frames, whole.frames)  # type: ignore[union-attr]


@pytest.mark.parametrize("index", [None, {"_class_name": "StableVideoDiffusionPipeline"}])
def test_other_folders_are_left_to_others(
    folder: Path, tmp_path: Path, index: dict[str, str] | None
) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    if index is not None:
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert family("inpaint").recognise(locate(str(tmp_path)), InpaintOptions()) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("StableDiffusionPipeline", "for single pictures and no video pipeline, .* a ControlNet"),
        ("StableDiffusionInpaintPipeline", "an inpainting pipeline"),
    ],
)
def test_a_folder_that_is_labelled_wrongly(tmp_path: Path, name: str, kind: str) -> None:
    """Say what the label means here, and what can be done, not only which file is not there."""
    (tmp_path / "transformer").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "transformer/model.safetensors")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(
        CheckpointError, match=rf"is a {name}, .*{kind}.*no unet/config.json, vae"
    ) as caught:
        everyframe.plan(model=str(tmp_path), **GIVEN)
    assert "correct _class_name" in str(caught.value)
    assert "everyframe models" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("unet", "diffusion_pytorch_model"), ("controlnet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"), ("text_encoder", "model"),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path, part: str, file: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "broken")
    path = copy / part / f"{file}.safetensors"
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    tensors.pop(lost)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="lacks 1 tensor: .*" + lost.rpartition(".")[2]):
        everyframe.generate(model=str(copy), **GIVEN)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "controlnet"])
def test_pickled_weights_are_refused(folder: Path, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "pickled")
    pickle = pickle_weights(copy / part)
    message = (
        rf"weights of its {part} are pickled \({pickle.name}\).*DiffusionPipeline.*save_pretrained"
    )
    with pytest.raises(CheckpointError, match=message):
        everyframe.plan(model=str(copy), **GIVEN)


def test_a_pickled_controlnet_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    net = shutil.copytree(folder / "controlnet", tmp_path / "net")
    pickle_weights(net)
    with pytest.raises(CheckpointError, match=r"its ControlNet are pickled.*ControlNetModel\.from"):
        everyframe.plan(model=str(folder), controlnet=str(net), **GIVEN)


def test_a_text_encoder_of_older_files(folder: Path, tmp_path: Path) -> None:
    """Before transformers 5 names began with ``text_model.``, and positions were stored."""
    copy = shutil.copytree(folder, tmp_path / "older")
    path = copy / "text_encoder/model.safetensors"
    bare = {name.removeprefix("text_model."): tensor for name, tensor in load_file(path).items()}
    older = {f"text_model.{name}": tensor for name, tensor in bare.items()}
    older["text_model.embeddings.position_ids"] = torch.arange(12)[None]
    save_file(older, path)
    made = everyframe.generate(model=str(copy), **GIVEN)
    whole = everyframe.generate(model=str(folder), **GIVEN)
    assert np.array_equal(made.frames, whole.frames)  # type: ignore[union-attr]


def test_a_prompt_that_is_too_long(folder: Path) -> None:
    given = {**GIVEN, "prompt": "a red ball on a grey street and a blue dog on it"}
    with pytest.raises(InputError, match=r"this model reads 12; shorten it, .* which cuts: '"):
        everyframe.plan(model=str(folder), **given)
    with pytest.raises(InputError, match="this model reads 12"):
        everyframe.generate(model=str(folder), **given)
    plan = everyframe.plan(model=str(folder), truncate_prompt=True, **given)
    video = everyframe.generate(model=str(folder), truncate_prompt=True, **given)
    assert isinstance(video, everyframe.Video)
    for notes in (plan.notes, video.record["notes"]):
        assert [note for note in notes if "its end is cut: '" in note], notes


@pytest.mark.parametrize(
    ("part", "changed", "text"),
    [
        ("scheduler", {"_class_name": "LMSDiscreteScheduler"}, "the scheduler is of class 'LMS"),
        ("unet", {"_class_name": "UNet3DConditionModel"}, "the unet is of class 'UNet3D"),
        ("unet", {"in_channels": 8}, "takes 8 channels .* a denoiser of 4 or of 9"),
        ("vae", {"scaling_factor": 0}, "its scaling_factor must be positive, got 0"),
        ("text_encoder", {"hidden_size": 1024}, "gives 1024 channels and the denoiser takes 768"),
        ("text_encoder", {"model_type": "t5"}, "is a 't5' model, expected CLIP's"),
        ("controlnet", {"cross_attention_dim": 1024}, "not made for this model: its cross_att"),
        ("controlnet", {"conditioning_channels": 4}, "sees pictures of 4 channels"),
        ("controlnet", {"addition_embed_type": "text_time"}, "of Stable Diffusion XL"),
        ("controlnet", {"_class_name": "SD3ControlNetModel"}, "expected ControlNetModel"),
    ],
)
def test_configs_that_can_not_be_run(part: str, changed: dict[str, Any], text: str) -> None:
    configs = dict(released(9))
    net = {"_class_name": "ControlNetModel", "cross_attention_dim": 768}
    if part == "controlnet":
        net |= changed
    else:
        configs[part] = {**configs[part], **changed}
    with pytest.raises(CheckpointError, match=text):
        InpaintConfig.from_json("here", configs, (("net", net),))
