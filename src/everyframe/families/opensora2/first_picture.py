"""FLUX.1's autoencoder, which decodes the first picture of a two-stage run.

FLUX.1's denoiser is `MMDiT`. Upstream saves the picture to a file and reads it as a given picture;
here it stays in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from everyframe.checkpoints.config_errors import config_errors
from everyframe.core.errors import CheckpointError

#: Latents of the denoiser are ``(latents - SHIFT) * SCALE`` of the autoencoder.
SCALE, SHIFT = 0.3611, 0.1159


def vae_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Sizes of FLUX.1's autoencoder from its tensors' shapes, under diffusers' names."""
    widths: list[int] = []
    while (name := f"encoder.down_blocks.{len(widths)}.resnets.0.conv1.weight") in shapes:
        widths.append(shapes[name][0])
    if len(widths) != 4 or "decoder.conv_in.weight" not in shapes:
        raise CheckpointError("no autoencoder of FLUX.1: its encoder must have four levels")
    start = "encoder.down_blocks.0.resnets."
    blocks = {name.removeprefix(start).split(".")[0] for name in shapes if name.startswith(start)}
    return {
        "block_out_channels": widths,
        "layers_per_block": len(blocks),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
    }


def build_vae(config: Mapping[str, Any]) -> nn.Module:
    """The untrained autoencoder: diffusers' `AutoencoderKL` without quantization layers."""
    from diffusers import AutoencoderKL

    widths = tuple(config["block_out_channels"])
    with config_errors("FLUX.1's autoencoder"):
        model: nn.Module = AutoencoderKL(
            block_out_channels=widths,
            layers_per_block=config["layers_per_block"],
            latent_channels=config["latent_channels"],
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    return model


def decode(vae: Any, latents_BCHW: Tensor) -> Tensor:
    """Decode the denoiser's latents to pixels (B, 3, H, W) around -1..1."""
    pixels: Tensor = vae.decoder(latents_BCHW / SCALE + SHIFT)
    return pixels
