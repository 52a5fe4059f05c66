"""Tiled VAE encoding and decoding: overlapping tiles, computed one at a time and blended.

Lossy: norms and attention of an autoencoder see one tile at a time, so each tile differs slightly
from the same area of the whole image, most where two tiles meet. Tiles fade into each other across
the overlap. Memory is that of one tile and of the whole result. Tile sides are rows and columns of
latents both ways, so that a tile is the same fraction of the image when encoding and decoding.
Tiling is used when a memory saving of a family asks for it
(`everyframe.runtime.interface.MemorySaving`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.runtime.interface import MemorySaving

if TYPE_CHECKING:
    from torch import Tensor

#: Rows and columns of latents in a tile, largest first; 512, 256 and 128 pixels in most models.
SIDES = (64, 32, 16)

#: Tiles in a dry run: the second runs while the result so far is in memory, like all others.
_DRY_RUN_TILES = 2

#: Names of the memory savings in settings; the value is the tile side in latents.
DECODE, ENCODE = "decode_tile", "encode_tile"

#: Name of the limit of tiles in the settings of a dry run.
_MOST = "dry_run_tiles"

#: Name of the saving before them: frames in one call of an image autoencoder.
FRAMES = "vae_frames"

#: Stage of each saving, and words for its note.
_SAYS = {
    DECODE: ("decode", "frames are decoded", "decoder"),
    ENCODE: ("given frames", "given frames are encoded", "encoder"),
}

#: Fraction of a tile, along each side, that overlaps its neighbour.
OVERLAP = 1 / 4


def for_dry_run(settings: Settings) -> Settings:
    """The settings of a dry run, which computes no more tiles than tell what all need."""
    return settings.with_saving(_MOST, _DRY_RUN_TILES)


def tiles_of(settings: Settings, name: str) -> tuple[int, int | None]:
    """Tile side and largest number of tiles in these settings; `name` is `DECODE` or `ENCODE`."""
    return settings.saving(name, 0), settings.saving(_MOST, 0) or None


def decode_in_tiles(
    decode: Callable[[Tensor], Tensor], latents: Tensor, side: int, most: int | None = None
) -> Tensor:
    """``decode(latents)`` in tiles; a `side` of 0, or as large as the latents, is a single call.

    `latents` (..., h, w) become pixels (..., H, W), where H and W are the same multiple of h and w.
    `most` limits the number of tiles, for a dry run, in which all tiles are alike.
    """
    height, width = latents.shape[-2:]
    return _in_tiles(decode, latents, (height, width), 1, side, most)


def encode_in_tiles(
    encode: Callable[[Tensor], Tensor],
    pixels: Tensor,
    factor: int,
    side: int,
    most: int | None = None,
) -> Tensor:
    """``encode(pixels)`` in tiles; `side` and `most` as in `decode_in_tiles`.

    `pixels` (..., H, W) become latents (..., h, w), one for `factor` rows and columns of pixels.
    Pixels left over at the end belong to no latent, or to the last.
    """
    height, width = (length // factor for length in pixels.shape[-2:])
    return _in_tiles(encode, pixels, (height, width), factor, side, most)


def _in_tiles(
    compute: Callable[[Tensor], Tensor],
    given: Tensor,
    size: tuple[int, int],
    each: int,
    side: int,
    most: int | None,
) -> Tensor:
    """Compute tiles of `given`, which has `each` rows for one of `size`, and blend them."""
    height, width = size
    corners = list(product(_starts(height, side), _starts(width, side)))
    if len(corners) == 1:
        return compute(given)
    made_HW: Tensor | None = None
    weights_HW: Tensor | None = None
    for top, left in corners[:most]:
        across = slice(left * each, (left + side) * each)
        tile = compute(given[..., top * each : (top + side) * each, across])
        rows, columns = tile.shape[-2:]
        factor = rows // min(side, height)
        if made_HW is None or weights_HW is None:
            whole = (height * factor, width * factor)
            made_HW = tile.new_zeros((*tile.shape[:-2], *whole))
            weights_HW = tile.new_zeros(whole)
        weight = _blend_weights(rows, tile)[:, None] * _blend_weights(columns, tile)
        at = (
            slice(top * factor, top * factor + rows),
            slice(left * factor, left * factor + columns),
        )
        made_HW[..., at[0], at[1]] += tile * weight
        weights_HW[at] += weight
    assert made_HW is not None, "there is a tile"
    assert weights_HW is not None, "there is a tile"
    return made_HW.div_(weights_HW)


def num_tiles(height: int, width: int, side: int) -> int:
    """Number of tiles for latents of that size."""
    return len(_starts(height, side)) * len(_starts(width, side))


def num_repeats(height: int, width: int, side: int) -> float:
    """How often the run does what the dry run does once, for latents of that size."""
    tiles = num_tiles(height, width, side)
    return tiles / min(tiles, _DRY_RUN_TILES)


def fewer_frames(settings: Settings, usual: int) -> Iterator[MemorySaving]:
    """Yield savings that halve the frames per call, down to 1; each frame is coded on its own."""
    frames = settings.saving(FRAMES, usual)
    while frames > 1:
        frames = ceil(frames / 2)
        settings = settings.with_saving(FRAMES, frames)
        yield MemorySaving(
            settings,
            f"frames are encoded and decoded {frames} at once, which only rounds differently",
        )


def tile_savings(
    settings: Settings,
    height: int,
    width: int,
    name: str = DECODE,
    sides: Sequence[int] | None = None,
) -> Iterator[MemorySaving]:
    """Yield savings with smaller and smaller tiles for latents of that size.

    `name` is `DECODE` or `ENCODE`, `sides` the tile sides, by default `SIDES`.
    """
    stage, what, who = _SAYS[name]
    by_now = settings.saving(name, max(height, width))
    for side in SIDES if sides is None else sides:
        tiles = num_tiles(height, width, side)
        if tiles > 1 and side < by_now:
            yield MemorySaving(
                settings.with_saving(name, side),
                f"{what} in {tiles} tiles that overlap and fade into each other, which "
                f"changes the picture: the {who} sees one tile at a time (lossy)",
                is_lossy=True,
                stage=stage,
            )


def _starts(length: int, side: int) -> list[int]:
    """Tile starts along one side: the fewest with enough overlap, evenly spaced."""
    if not side or length <= side:
        return [0]
    overlap = int(side * OVERLAP)
    number = -(-(length - overlap) // (side - overlap))
    return [round(index * (length - side) / (number - 1)) for index in range(number)]


def _blend_weights(length: int, like: Tensor) -> Tensor:
    """Blend weights of a tile along one side: 1 in the middle, falling towards both ends."""
    import torch

    places = torch.arange(length, device=like.device, dtype=like.dtype) + 0.5
    return (torch.minimum(places, length - places) / (length * OVERLAP)).clamp(max=1)
