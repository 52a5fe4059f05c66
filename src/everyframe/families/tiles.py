"""Decoding in tiles: latents in overlapping squares, decoded one after the other, and blended.

Lossy: a decoder's norms and its attention see one tile at a time, so each differs a little from the
same place in the whole picture, and most where two of them meet. Across the overlap one fades into
the next. Memory is that of one tile, and of the whole result.

Not here: when it is done. That is a saving of a family (`everyframe.families.family.Saving`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.families.family import Saving

if TYPE_CHECKING:
    from torch import Tensor

#: Rows and columns of latents in a tile, largest first; 512, 256 and 128 pixels in most models.
SIDES = (64, 32, 16)

#: Tiles of a dry run: the second is decoded while the result so far is held, as all others are.
REHEARSED = 2

#: Name of the saving in settings: rows and columns of latents in a tile.
NAME = "decode_tile"

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
    corners = list(product(_starts(height, side), _starts(width, side)))
    if len(corners) == 1:
        return decode(latents)
    pixels_HW: Tensor | None = None
    weights_HW: Tensor | None = None
    for top, left in corners[:most]:
        tile = decode(latents[..., top : top + side, left : left + side])
        rows, columns = tile.shape[-2:]
        factor = rows // min(side, height)
        if pixels_HW is None or weights_HW is None:
            whole = (height * factor, width * factor)
            pixels_HW = tile.new_zeros((*tile.shape[:-2], *whole))
            weights_HW = tile.new_zeros(whole)
        weight = _fading(rows, tile)[:, None] * _fading(columns, tile)
        at = (
            slice(top * factor, top * factor + rows),
            slice(left * factor, left * factor + columns),
        )
        pixels_HW[..., at[0], at[1]] += tile * weight
        weights_HW[at] += weight
    assert pixels_HW is not None, "there is a tile"
    assert weights_HW is not None, "there is a tile"
    return pixels_HW.div_(weights_HW)


def num_tiles(height: int, width: int, side: int) -> int:
    """How many tiles latents of that size are decoded in."""
    return len(_starts(height, side)) * len(_starts(width, side))


def num_repeats(height: int, width: int, side: int) -> float:
    """How often what is rehearsed is done for latents of that size."""
    tiles = num_tiles(height, width, side)
    return tiles / min(tiles, REHEARSED)


def tile_savings(settings: Settings, height: int, width: int) -> Iterator[Saving]:
    """Smaller and smaller tiles for latents of that size."""
    by_now = settings.saving(NAME, max(height, width))
    for side in SIDES:
        tiles = num_tiles(height, width, side)
        if tiles > 1 and side < by_now:
            yield Saving(
                settings.with_saving(NAME, side),
                f"frames are decoded in {tiles} tiles that overlap and fade into each other, which "
                "changes the picture: the decoder sees one tile at a time (lossy)",
                is_lossy=True,
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
