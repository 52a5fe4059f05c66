"""Open-Sora's autoencoder as a run calls it: a few frames at once, and in tiles where it must be.

Called by the stages and by their dry runs. Not here: the autoencoder itself (`vae.py`). Read next:
`everyframe.families.tiles`, `decoding.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families import tiles
from everyframe.families.latents import Piece
from everyframe.families.opensora.vae import ImageVAE, VideoVAE


def encoded(
    vae: ImageVAE | VideoVAE,
    video_BCTHW: Tensor,
    settings: Settings,
    *,
    still: int | None = None,
    most_tiles: int | None = None,
) -> Tensor:
    """Latents (B, C, T, h, w) of a video in -1..1, float32 on the CPU.

    With `still`, of one frame as if it stood still for so many.
    """
    at_once = settings.saving(tiles.FRAMES, 0) or None

    def encode(part: Tensor) -> Tensor:
        if still is not None:
            return vae.encode_still(part, still)
        return vae.encode(part, at_once=at_once)

    factor, side = vae.config.spatial_factor, settings.saving(tiles.ENCODE, 0)
    latents = tiles.encode_in_tiles(encode, video_BCTHW, factor, side, most=most_tiles)
    return latents.to("cpu", torch.float32)


def decoded(
    vae: ImageVAE | VideoVAE,
    latents_BCTHW: Tensor,
    piece: Piece,
    settings: Settings,
    *,
    most_tiles: int | None = None,
) -> Tensor:
    """The pixels (B, 3, T, H, W) around -1..1 of one piece of a video whose latents these are."""
    at_once = settings.saving(tiles.FRAMES, 0) or None

    def decode(part: Tensor) -> Tensor:
        return vae.decode_piece(part, piece, at_once)

    side = settings.saving(tiles.DECODE, 0)
    return tiles.decode_in_tiles(decode, latents_BCTHW, side, most=most_tiles)
