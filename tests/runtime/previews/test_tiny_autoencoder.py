"""Tiny autoencoders for previews: TAESD against diffusers' own, TAEHV frame by frame."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import everyframe
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.events import Preview
from everyframe.runtime.previews.tiny_autoencoder import TinyDecoder
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

WIDTHS = (32, 16, 8, 8)


def taesd(folder: Path, channels: int = 4) -> AutoencoderTiny:
    torch.manual_seed(0)
    model = AutoencoderTiny(
        latent_channels=channels, encoder_block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
    ).eval()  # fmt: skip
    model.save_pretrained(folder)
    return model


def taehv(file: Path, channels: int = 16, patch: int = 1) -> dict[str, Tensor]:
    """A file with random weights of TAEHV's names and shapes."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 30**0.5

    tensors = {"encoder.0.weight": draw(8, 3, 3, 3)}
    tensors |= {
        "decoder.1.weight": draw(WIDTHS[0], channels, 3, 3),
        "decoder.1.bias": draw(WIDTHS[0], 1)[:, 0],
    }
    number = 3
    for stage, (width, following) in enumerate(itertools.pairwise(WIDTHS)):
        for block in range(number, number + 3):
            for place, inputs in ((0, 2 * width), (2, width), (4, width)):
                tensors[f"decoder.{block}.conv.{place}.weight"] = draw(width, inputs, 3, 3) / 3
                tensors[f"decoder.{block}.conv.{place}.bias"] = draw(width, 1)[:, 0]
        frames = 2 if stage else 1
        tensors[f"decoder.{number + 4}.conv.weight"] = draw(frames * width, width, 1, 1)
        tensors[f"decoder.{number + 5}.weight"] = draw(following, width, 3, 3)
        number += 6
    tensors[f"decoder.{number + 1}.weight"] = draw(3 * patch**2, WIDTHS[-1], 3, 3)
    tensors[f"decoder.{number + 1}.bias"] = draw(3 * patch**2, 1)[:, 0]
    save_file(tensors, file)
    return tensors


def by_frames(tensors: dict[str, Tensor], frames_CTHW: Tensor, patch: int) -> Tensor:
    """TAEHV's decoder with one frame of each layer's kind at a time; the last picture (H, W, 3)."""
    layers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("decoder.")})
    past: dict[int, Tensor] = {}
    for latent in frames_CTHW.unbind(1):
        x = torch.tanh(latent[None] / 3) * 3
        for layer in layers:

            def given(name: str, layer: int = layer) -> Tensor | None:
                return tensors.get(f"decoder.{layer}.{name}")

            if given("conv.0.weight") is not None:
                before = past.get(layer, torch.zeros_like(x))
                past[layer] = x
                y = torch.cat([x, before], 1)
                for place in (0, 2, 4):
                    y = F.conv2d(
                        y, given(f"conv.{place}.weight"), given(f"conv.{place}.bias"), padding=1
                    )
                    y = F.relu(y) if place < 4 else y
                x = F.relu(y + x)
            elif given("conv.weight") is not None:
                x = F.interpolate(x, scale_factor=2)
                x = F.conv2d(x, given("conv.weight"))[:, -x.shape[1] :]
            else:
                is_last = layer == layers[-1]
                x = F.conv2d(F.relu(x) if is_last else x, given("weight"), given("bias"), padding=1)
                x = F.relu(x) if layer == layers[0] else x
    return F.pixel_shuffle(x, patch)[0].movedim(0, -1) * 2 - 1


def test_taesd_is_diffusers_own(tmp_path: Path) -> None:
    model = taesd(tmp_path)
    latents = torch.randn(4, 3, 8, 12)
    with torch.no_grad():
        wanted = model.decode(latents[:, -1][None]).sample[0].movedim(0, -1)
    found = TinyDecoder(tmp_path)
    assert found.channels == 4
    torch.testing.assert_close(found(latents), wanted, rtol=0, atol=1e-5)


def test_upsampling_ends_where_the_picture_is_large_enough(tmp_path: Path) -> None:
    taesd(tmp_path)
    assert TinyDecoder(tmp_path)(torch.zeros(4, 1, 16, 70)).shape == (64, 280, 3)


@pytest.mark.parametrize("patch", [1, 2])
def test_taehv_frame_by_frame(tmp_path: Path, patch: int) -> None:
    tensors = taehv(tmp_path / "tae.safetensors", patch=patch)
    latents = torch.randn(16, 3, 4, 6)
    wanted = by_frames(tensors, latents, patch)
    found = TinyDecoder(tmp_path / "tae.safetensors")
    assert found.channels == 16
    torch.testing.assert_close(found(latents), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["decoder.3.conv.0.weight", "decoder.22.weight", "decoder.7.conv.weight"]
)
def test_a_file_that_lacks_a_layer_is_refused(tmp_path: Path, name: str) -> None:
    tensors = taehv(tmp_path / "tae.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "tae.safetensors")
    with pytest.raises(CheckpointError, match="no decoder of TAESD or TAEHV"):
        TinyDecoder(tmp_path / "tae.safetensors")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("decoder.1.weight", (8,)), ("decoder.22.weight", (4, 8, 3, 3)), ("decoder.22.weight", ()),
     ("decoder.8.weight", (16, 9, 3, 3)), ("decoder.3.conv.2.weight", ())],
    ids=["flat", "four colours", "a number", "another width", "a number in a block"],
)  # fmt: skip
def test_a_file_whose_layers_do_not_fit_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """Before the run: the first preview would end it."""
    tensors = {**taehv(tmp_path / "tae.safetensors"), name: torch.zeros(shape)}
    if name == "decoder.22.weight":
        tensors["decoder.22.bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "tae.safetensors")
    with pytest.raises(CheckpointError, match="no decoder of TAESD or TAEHV"):
        TinyDecoder(tmp_path / "tae.safetensors")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "tae.safetensors")
    with pytest.raises(CheckpointError, match="no decoder of TAESD or TAEHV"):
        TinyDecoder(tmp_path / "tae.safetensors")


def test_a_run_shows_itself_by_it(tmp_path: Path) -> None:
    tiny_pipelines.TINY["wan"](tmp_path / "wan")
    taehv(tmp_path / "tae.safetensors")
    taesd(tmp_path / "taesd")
    events: list[Preview] = []
    asked = {"prompt": "a fox", "num_inference_steps": 2, "seed": 3, "model": str(tmp_path / "wan"),
             **tiny_pipelines.CALLS["wan"]}  # fmt: skip
    video = everyframe.generate(
        **asked, preview_decoder=tmp_path / "tae.safetensors", run_dir="off",
        on_event=lambda event: events.append(event) if isinstance(event, Preview) else None,
    )  # fmt: skip
    assert [each.step for each in events] == [1, 2]
    assert "preview_decoder" not in video.record["request"]
    with pytest.raises(InputError, match="latents of 4 channels, and this model's have 16"):
        everyframe.plan(**asked, preview_decoder=tmp_path / "taesd")
    with pytest.raises(InputError, match="is no file or folder"):
        everyframe.plan(**asked, preview_decoder=tmp_path / "none")
