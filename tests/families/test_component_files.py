"""Every part's files are held against the part before anything is loaded, in every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from everyframe.core.errors import CheckpointError
from everyframe.core.request import Request
from everyframe.planning.find_model import find_model
from everyframe.runtime.loading import check_contents
from everyframe.runtime.model_spec import NativeModelSpec
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo
from helpers.tiny_checkpoints import svd as tiny_svd

#: The maker of a tiny checkpoint, and the files of its parts.
PARTS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "opensora-1.2": (
        tiny_opensora.opensora_1_2,
        ("model.safetensors", "text_encoder/model.safetensors", "vae/model.safetensors"),
    ),
    "opensora-1.0": (tiny_opensora.opensora_1_0, ("vae/diffusion_pytorch_model.safetensors",)),
    "svd": (
        tiny_svd.svd,
        (
            "image_encoder/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
        ),
    ),
    "inpaint": (
        tiny_inpaint.inpaint,
        (
            "text_encoder/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
            "controlnet/diffusion_pytorch_model.safetensors",
        ),
    ),
    "stepvideo": (
        tiny_stepvideo.stepvideo,
        (
            "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
            "vae/vae_v2.safetensors",
        ),
    ),
}


@pytest.mark.parametrize("family", list(PARTS))
def test_a_misshapen_tensor_in_any_part_is_told_by_headers_alone(
    family: str, tmp_path: Path
) -> None:
    make, files = PARTS[family]
    place = make(tmp_path / "model")
    options = {"control": "canny"} if family == "inpaint" else {}
    model, _ = find_model(Request(prompt="a", model=str(place), **options), may_fetch=False)
    assert isinstance(model, NativeModelSpec)
    check_contents(model)  # nothing is wrong with it
    for file in files:
        path = tmp_path / "model" / file
        whole = path.read_bytes()
        tensors = load_file(path)
        name = max(tensors, key=lambda each: tensors[each].numel())
        tensors[name] = torch.zeros(*tensors[name].shape, 2)
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            check_contents(model)
        assert f"{name!r} has shape" in str(error.value)
        path.write_bytes(whole)
