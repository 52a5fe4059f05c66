"""Stable Video Diffusion's autoencoder: encode an image, decode frames, tiled on request.

The module is diffusers' `AutoencoderKLTemporalDecoder`, or `AutoencoderKL`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.svd.config import SVDConfig
from everyframe.runtime.stages import tiling


def encode(
    vae: Any,
    config: SVDConfig,
    picture_BCHW: Tensor,
    settings: Settings,
) -> Tensor:
    """Encode images in -1..1 to unscaled latents (B, C, h, w); tiled if the settings ask for it."""

    def encode_tile(part: Tensor) -> Tensor:
        latents: Tensor = vae.encode(part).latent_dist.mode()
        return latents

    factor, tiles = config.spatial_factor, tiling.tiles_of(settings, tiling.ENCODE)
    return tiling.encode_in_tiles(encode_tile, picture_BCHW, factor, *tiles)


def decode(
    vae: Any,
    config: SVDConfig,
    latents_TCHW: Tensor,
    settings: Settings,
) -> Tensor:
    """Decode latents, all frames together, to pixels (T, 3, H, W) around -1..1."""
    together = {"num_frames": len(latents_TCHW)} if config.decodes_together else {}

    def decode_tile(part: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(part, **together).sample
        return pixels

    tiles = tiling.tiles_of(settings, tiling.DECODE)
    return tiling.decode_in_tiles(decode_tile, latents_TCHW, *tiles)
