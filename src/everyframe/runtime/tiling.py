"""Decoding and encoding in tiles: overlapping squares, one after the other, that are blended.

Lossy: an autoencoder's norms and its attention see one tile at a time, so each differs a little
from the same place in the whole picture, and most where two of them meet. Across the overlap one
fades into the next. Memory is that of one tile, and of the whole result. Sides count rows and
columns of latents both ways, so that a tile is as large a part of the picture in either.

Not here: when it is done. That is a saving of a family
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

#: Tiles of a dry run: the second is decoded while the result so far is held, as all others are.
REHEARSED = 2

#: Names of the savings in settings: rows and columns of latents in a tile.
DECODE, ENCODE = "decode_tile", "encode_tile"

#: Name of the saving that comes before them: frames in one call of an autoencoder of pictures.
FRAMES = "vae_frames"

#: The stage that each of the two is for, and how it is told.
_SAYS = {
    DECODE: ("decode", "frames are decoded", "decoder"),
    ENCODE: ("given frames", "given frames are encoded", "encoder"),
}

#: Share of a tile, along each side, in which it fades into its neighbour.
OVERLAP = 1 / 4


def decode_in_tiles(
    decode: Callable[[Tensor], Tensor], latents: Tensor, side: int, *, most: int | None = None
) -> Tensor:
    """``decode(latents)`` put together of tiles; `side` 0 or as large as the latents is no tiles.

    `latents` (..., h, w) become pixels (..., H, W), H and W the same multiple of h and w. With
    `most`, no more than so many tiles are decoded: for a dry run, in which they are alike.
    """
    height, width = latents.shape[-2:]
    return _in_tiles(decode, latents, (height, width), 1, side, most)


def encode_in_tiles(
    encode: Callable[[Tensor], Tensor],
    pixels: Tensor,
    factor: int,
    side: int,
    *,
    most: int | None = None,
) -> Tensor:
    """``encode(pixels)`` put together of tiles; `side` and `most` as in `decode_in_tiles`.

    `pixels` (..., H, W) become latents (..., h, w), one for `factor` rows and columns of pixels;
    what is over at the end belongs to none, or to the last.
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
    """What `compute` makes of tiles of `given`, which has `each` rows for one of `size`."""
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
        weight = _fading(rows, tile)[:, None] * _fading(columns, tile)
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
    """How many tiles there are for latents of that size."""
    return len(_starts(height, side)) * len(_starts(width, side))


def num_repeats(height: int, width: int, side: int) -> float:
    """How often what is rehearsed is done for latents of that size."""
    tiles = num_tiles(height, width, side)
    return tiles / min(tiles, REHEARSED)


def fewer_frames(settings: Settings, usual: int) -> Iterator[MemorySaving]:
    """Half as many frames at once, and again, down to one; each is coded by itself."""
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
    """Smaller and smaller tiles for latents of that size, in which is done what `name` says.

    `sides` are those of the tiles, `SIDES` as a rule.
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
    """Where tiles begin along one side: as few as overlap enough, evenly spread."""
    if not side or length <= side:
        return [0]
    overlap = int(side * OVERLAP)
    number = -(-(length - overlap) // (side - overlap))
    return [round(index * (length - side) / (number - 1)) for index in range(number)]


def _fading(length: int, like: Tensor) -> Tensor:
    """Weights of a tile along one side: 1 in the middle, less and less towards both ends."""
    import torch

    places = torch.arange(length, device=like.device, dtype=like.dtype) + 0.5
    return (torch.minimum(places, length - places) / (length * OVERLAP)).clamp(max=1)
