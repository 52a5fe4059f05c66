"""Encode and decode with either autoencoder of Open-Sora 2.0, tile by tile as upstream does.

Latents of the sampler are the autoencoder's times its scale. A tile fades into its neighbours over
their overlap: first into the one above, then into the one to its left, and tiles of frames into the
one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.plan import Settings
from everyframe.families.opensora2.vae_config import (
    AxisTiles,
    DCAEConfig,
    HunyuanVAEConfig,
    Tiles,
    VAEConfig,
)
from everyframe.runtime.stages import tiling

Corner = tuple[int, int, int]
"""Number of a tile along frames, rows and columns."""


def build(config: VAEConfig) -> nn.Module:
    """The untrained autoencoder of those sizes."""
    if isinstance(config, HunyuanVAEConfig):
        from everyframe.families.opensora2.hunyuan_vae import build_vae

        return build_vae(config)
    from everyframe.families.opensora2.dcae import DCAE

    assert isinstance(config, DCAEConfig)
    return DCAE(config)


def coded(vae: Any, config: VAEConfig, pixels: Tensor, settings: Settings | None = None) -> Tensor:
    """Result of the encoder for pixels (B, 3, T, H, W): HunyuanVideo's moments, else latents.

    `settings` may ask for smaller tiles within upstream's.
    """
    smaller = (0, None) if settings is None else tiling.tiles_of(settings, tiling.ENCODE)

    def encode(part: Tensor) -> Tensor:
        out: Tensor = vae.encoder(part)
        return out if config.is_high_compression else vae.quant_conv(out)

    def encode_tile(tile: Tensor) -> Tensor:
        return tiling.encode_in_tiles(encode, tile, config.spatial_factor, *smaller)

    return in_tiles(encode_tile, pixels, config.encode_tiles(), smaller[1])


def encode(vae: Any, config: VAEConfig, pixels: Tensor, settings: Settings | None = None) -> Tensor:
    """Latents (B, C, t, h, w) of pixels in -1..1; the mean where there is a distribution.

    Upstream draws from the distribution, by a generator that no seed of a run sets.
    """
    found = coded(vae, config, pixels, settings)
    if isinstance(config, HunyuanVAEConfig):
        return (found.chunk(2, dim=1)[0] - config.shift_factor) * config.scale_factor
    return found / config.scale_factor


def decode_tile(
    vae: Any, config: VAEConfig, latents: Tensor, settings: Settings | None = None
) -> Tensor:
    """Pixels (B, 3, T, H, W) around -1..1 of one tile of latents.

    `settings` may ask for smaller tiles within it.
    """

    def decode(part: Tensor) -> Tensor:
        if isinstance(config, HunyuanVAEConfig):
            given = part / config.scale_factor + config.shift_factor
            out: Tensor = vae.decoder(vae.post_quant_conv(given))
        else:
            out = vae.decoder(part * config.scale_factor)
        return out

    smaller = (0, None) if settings is None else tiling.tiles_of(settings, tiling.DECODE)
    return tiling.decode_in_tiles(decode, latents, *smaller)


def decode(vae: Any, config: VAEConfig, latents: Tensor) -> Tensor:
    """Pixels (B, 3, T, H, W) of all latents."""

    def one(part: Tensor) -> Tensor:
        return decode_tile(vae, config, part)

    return in_tiles(one, latents, config.decode_tiles())


def in_tiles(
    compute: Callable[[Tensor], Tensor], given_BCTHW: Tensor, tiles: Tiles, most: int | None = None
) -> Tensor:
    """``compute(given)`` in these tiles, blended; of a dry run, which has a `most`, the first."""
    blender = TileBlender(tiles, tuple(given_BCTHW.shape[2:]))
    if most is not None or len(blender.corners) == 1:
        return compute(blender.cut(given_BCTHW, (0, 0, 0)))
    parts = [blender.add(c, compute(blender.cut(given_BCTHW, c))) for c in blender.corners]
    return torch.cat([part for part in parts if part is not None], dim=2)


class TileBlender:
    """Blend the tiles of one video (T, H, W) as they come, in the order of `corners`."""

    def __init__(self, tiles: Tiles, size: Sequence[int]) -> None:
        self.tiles, self.spans = tiles, tiles.spans(tuple(size))
        self.corners: list[Corner] = list(product(*(range(len(each)) for each in self.spans)))  # type: ignore[arg-type]
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._before: Tensor | None = None

    def cut(self, given_BCTHW: Tensor, corner: Corner) -> Tensor:
        """The input of a tile."""
        t, h, w = (
            slice(span[n].start, span[n].stop) for span, n in zip(self.spans, corner, strict=True)
        )
        return given_BCTHW[:, :, t, h, w]

    def add(self, corner: Corner, tile_BCTHW: Tensor) -> Tensor | None:
        """Add the next tile; return the frames (B, C, n, H, W) that are finished now, if any."""
        frame, row, column = corner
        self._seen[row, column] = tile_BCTHW
        if (row + 1, column + 1) != (len(self.spans[1]), len(self.spans[2])):
            return None
        whole, self._seen = self._across(self._seen), {}
        return self._along(frame, whole)

    def _across(self, seen: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """All rows and columns of tiles as one."""
        sides = self.tiles.sides
        if len(seen) == 1 or sides is None:
            return next(iter(seen.values()))
        rows, columns = len(self.spans[1]), len(self.spans[2])
        done: dict[tuple[int, int], Tensor] = {}
        for (row, column), tile in seen.items():
            if row:
                tile = blended(done[row - 1, column], tile, sides.blend, 3)
            if column:
                tile = blended(done[row, column - 1], tile, sides.blend, 4)
            done[row, column] = tile
        step = sides.out_step
        lines = [
            torch.cat([done[r, c][..., :step, :step] for c in range(columns)], dim=4)
            for r in range(rows)
        ]
        return torch.cat(lines, dim=3)

    def _along(self, frame: int, tile: Tensor) -> Tensor:
        """Blend a tile of all rows and columns with the frames before it."""
        axis, is_last = self.tiles.frames, frame + 1 == len(self.spans[0])
        if axis is None or len(self.spans[0]) == 1:
            return tile
        if frame:
            assert self._before is not None
            tile = blended(self._before, tile[:, :, axis.lead :], axis.blend, 2)
        self._before = None if is_last else tile
        return tile if is_last else tile[:, :, : _frames_until_next(axis, frame)]


def _frames_until_next(axis: AxisTiles, frame: int) -> int:
    return axis.out_step + (0 if frame else axis.lead)


def blended(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """`tile`, whose first `extent` along `dim` fade in from the last ones of `before`."""
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if not extent:
        return tile
    shape = [-1 if each == dim else 1 for each in range(tile.ndim)]
    weight = (torch.arange(extent, device=tile.device, dtype=tile.dtype) / extent).view(shape)
    old = before.narrow(dim, before.shape[dim] - extent, extent)
    new = tile.narrow(dim, 0, extent)
    rest = tile.narrow(dim, extent, tile.shape[dim] - extent)
    return torch.cat([old * (1 - weight) + new * weight, rest], dim)
