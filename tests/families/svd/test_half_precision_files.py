"""Weights stored in half precision, and which parts then run in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLTemporalDecoder, StableVideoDiffusionPipeline

import everyframe
from everyframe.core.errors import CheckpointError, InputError
from helpers.tiny_checkpoints import svd as tiny_svd

PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
SMALL: dict[str, Any] = {
    "size": "32x32", "num_frames": 2, "num_inference_steps": 1, "seed": 1, "output": "float",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the released ones lie on the hub: each part's weights in float32 and in fp16."""
    place = tiny_svd.svd(tmp_path_factory.mktemp("models") / "tiny-svd")
    pipe = StableVideoDiffusionPipeline.from_pretrained(place).to(torch.float16)
    pipe.save_pretrained(place, variant="fp16")
    return place


@pytest.fixture(scope="module")
def only_fp16(folder: Path) -> Path:
    place = folder.parent / "fp16"
    pipe = StableVideoDiffusionPipeline.from_pretrained(folder, variant="fp16").to(torch.float16)
    pipe.save_pretrained(place, variant="fp16")
    assert not list(place.glob("*/diffusion_pytorch_model.safetensors"))
    return place


def frames(model: Path, **changed: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(model=str(model), image=PICTURE, **{**SMALL, **changed})
    assert isinstance(video, everyframe.Video)
    return video.frames


def test_a_variant_is_read_where_it_is_asked_for_or_alone(folder: Path, only_fp16: Path) -> None:
    asked = frames(folder, variant="fp16")
    assert np.array_equal(asked, frames(only_fp16))
    assert not np.array_equal(asked, frames(folder))


def test_a_variant_that_is_not_there(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights in the variant 'bf16'"):
        frames(folder, variant="bf16")
    with pytest.raises(InputError, match="variant"):
        frames(folder, variant="../fp16")


def test_an_autoencoder_that_overflows_half_precision_decodes_in_float32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers decodes it in half precision, whatever the checkpoint says of itself."""
    seen = []
    decode = AutoencoderKLTemporalDecoder.decode

    def watched(self: Any, z: torch.Tensor, **options: Any) -> Any:
        result = decode(self, z, **options)
        if not z.is_meta:  # a dry run, where no test before has made the same
            seen.append((z.dtype, {p.dtype for p in self.parameters()}, result.sample.dtype))
        return result

    monkeypatch.setattr(AutoencoderKLTemporalDecoder, "decode", watched)
    frames(folder, dtype="fp16", force=True, variant="fp16")
    assert seen == [(torch.float32, {torch.float32}, torch.float32)]
    plan = everyframe.plan(
        model=str(folder), image=PICTURE, dtype="fp16", force=True, size="32x32", num_frames=2
    )
    assert "vae: float32 although fp16 was asked" in " ".join(plan.notes)


def test_bfloat16_is_done_where_it_is_asked_for_and_its_price_reported(folder: Path) -> None:
    plan = everyframe.plan(
        model=str(folder), image=PICTURE, dtype="bf16", size="32x32", num_frames=2
    )
    assert plan.component("vae").precision.parameters == "bfloat16"
    assert "vae: bf16 keeps 8 bits" in " ".join(plan.notes)
