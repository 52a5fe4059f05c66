"""Autoencoder of an inpainting model: encode and decode images, tiled on request.

The module is diffusers' `AutoencoderKL`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.runtime.stages import tiling


def posterior(
    vae: Any, picture_FCHW: Tensor, factor: int, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F, 4, h, w) of an image's latents; float32, on the CPU.

    A latent covers `factor` rows and columns. The settings determine frames per call and tiles.
    """
    tiles = tiling.tiles_of(settings, tiling.ENCODE)

    def encode(part: Tensor) -> Tensor:
        found = vae.encode(part).latent_dist
        return torch.cat([found.mean, found.std], dim=1)

    lots = torch.split(picture_FCHW, settings.saving(tiling.FRAMES, len(picture_FCHW)))
    made = [tiling.encode_in_tiles(encode, lot, factor, *tiles) for lot in lots]
    mean, deviation = torch.cat(made).to("cpu", torch.float32).chunk(2, dim=1)
    return mean, deviation


def decode(vae: Any, latents_FChw: Tensor, settings: Settings) -> Tensor:
    """Decode unscaled latents to pixels (F, 3, H, W) around -1..1; float32, on the CPU."""
    tiles = tiling.tiles_of(settings, tiling.DECODE)

    def decode_tile(part: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(part).sample
        return pixels

    lots = torch.split(latents_FChw, settings.saving(tiling.FRAMES, len(latents_FChw)))
    made = [tiling.decode_in_tiles(decode_tile, lot, *tiles) for lot in lots]
    return torch.cat([each.to("cpu", torch.float32) for each in made])
