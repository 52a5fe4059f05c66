"""Step-Video's autoencoder as a run calls it: a piece at a time, and in tiles where it must be.

Called by the stages and by their dry runs. Not here: the autoencoder itself (`vae.py`), whose
pieces are upstream's. Read next: `everyframe.families.tiles`, `stages.py`.
"""

from __future__ import annotations

from functools import partial

from einops import rearrange
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families import tiles
from everyframe.families.latents import Piece
from everyframe.families.stepvideo.vae import StepVAE


def decoded(
    vae: StepVAE,
    latents_BCTHW: Tensor,
    piece: Piece,
    settings: Settings,
    *,
    most_tiles: int | None = None,
) -> Tensor:
    """The pixels (T, C, H, W) around -1..1 of one piece of a video whose latents these are."""
    side = settings.saving(tiles.DECODE, 0)
    decode = partial(vae.decode_piece, piece=piece)
    pixels = tiles.decode_in_tiles(decode, latents_BCTHW, side, most=most_tiles)
    return rearrange(pixels, "1 c t h w -> t c h w")
