"""Encode and decode with either autoencoder of Open-Sora 2.0, in upstream's tiles.

The sampler's latents are the autoencoder's times its scale. Overlapping tiles are blended linearly:
first with the tile above, then with the tile to the left, and along frames with the tile before.
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
    """Build an untrained autoencoder of these sizes."""
    if isinstance(config, HunyuanVAEConfig):
        from everyframe.families.opensora2.hunyuan_vae import build_vae

        return build_vae(config)
    from everyframe.families.opensora2.dcae import DCAE

    assert isinstance(config, DCAEConfig)
    return DCAE(config)


def run_encoder(
    vae: Any, config: VAEConfig, pixels: Tensor, settings: Settings | None = None
) -> Tensor:
    """Run the encoder on pixels (B, 3, T, H, W): HunyuanVideo's moments, DC-AE's latents.

    With `settings` that save memory, it runs in smaller tiles within upstream's.
    """
    smaller = (0, None) if settings is None else tiling.tiles_of(settings, tiling.ENCODE)

    def encode(part: Tensor) -> Tensor:
        out: Tensor = vae.encoder(part)
        return out if config.is_high_compression else vae.quant_conv(out)

    def encode_tile(tile: Tensor) -> Tensor:
        return tiling.encode_in_tiles(encode, tile, config.spatial_factor, *smaller)

    return apply_in_tiles(encode_tile, pixels, config.encode_tiles(), smaller[1])


def encode(vae: Any, config: VAEConfig, pixels: Tensor, settings: Settings | None = None) -> Tensor:
    """Latents (B, C, t, h, w) of pixels in -1..1; the mean where there is a distribution.

    Upstream samples the distribution, with a generator that the run's seed does not set.
    """
    found = run_encoder(vae, config, pixels, settings)
    if isinstance(config, HunyuanVAEConfig):
        return (found.chunk(2, dim=1)[0] - config.shift_factor) * config.scale_factor
    return found / config.scale_factor


def decode_tile(
    vae: Any, config: VAEConfig, latents: Tensor, settings: Settings | None = None
) -> Tensor:
    """Decode one tile of latents to pixels (B, 3, T, H, W) around -1..1.

    With `settings` that save memory, it runs in smaller tiles within this one.
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
    """Decode all latents to pixels (B, 3, T, H, W)."""

    def one(part: Tensor) -> Tensor:
        return decode_tile(vae, config, part)

    return apply_in_tiles(one, latents, config.decode_tiles())


def apply_in_tiles(
    compute: Callable[[Tensor], Tensor], given_BCTHW: Tensor, tiles: Tiles, most: int | None = None
) -> Tensor:
    """Apply `compute` to each tile and blend the results.

    With `most`, as in a dry run, only the first tile is computed.
    """
    blender = TileBlender(tiles, tuple(given_BCTHW.shape[2:]))
    if most is not None or len(blender.corners) == 1:
        return compute(blender.cut(given_BCTHW, (0, 0, 0)))
    parts = [blender.add(c, compute(blender.cut(given_BCTHW, c))) for c in blender.corners]
    return torch.cat([part for part in parts if part is not None], dim=2)


class TileBlender:
    """Blends the tiles of one video (T, H, W) as they arrive, in the order of `corners`."""

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
        """Blend a grid of tiles over rows and columns."""
        sides = self.tiles.sides
        if len(seen) == 1 or sides is None:
            return next(iter(seen.values()))
        rows, columns = len(self.spans[1]), len(self.spans[2])
        done: dict[tuple[int, int], Tensor] = {}
        for (row, column), tile in seen.items():
            if row:
                tile = cross_fade(done[row - 1, column], tile, sides.blend, 3)
            if column:
                tile = cross_fade(done[row, column - 1], tile, sides.blend, 4)
            done[row, column] = tile
        step = sides.out_step
        lines = [
            torch.cat([done[r, c][..., :step, :step] for c in range(columns)], dim=4)
            for r in range(rows)
        ]
        return torch.cat(lines, dim=3)

    def _along(self, frame: int, tile: Tensor) -> Tensor:
        """Blend full frames with the frames before them."""
        axis, is_last = self.tiles.frames, frame + 1 == len(self.spans[0])
        if axis is None or len(self.spans[0]) == 1:
            return tile
        if frame:
            assert self._before is not None
            tile = cross_fade(self._before, tile[:, :, axis.lead :], axis.blend, 2)
        self._before = None if is_last else tile
        return tile if is_last else tile[:, :, : _frames_until_next(axis, frame)]


def _frames_until_next(axis: AxisTiles, frame: int) -> int:
    return axis.out_step + (0 if frame else axis.lead)


def cross_fade(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Cross-fade from the end of `before` into the first `extent` of `tile` along `dim`."""
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if not extent:
        return tile
    shape = [-1 if each == dim else 1 for each in range(tile.ndim)]
    weight = (torch.arange(extent, device=tile.device, dtype=tile.dtype) / extent).view(shape)
    old = before.narrow(dim, before.shape[dim] - extent, extent)
    new = tile.narrow(dim, 0, extent)
    rest = tile.narrow(dim, extent, tile.shape[dim] - extent)
    return torch.cat([old * (1 - weight) + new * weight, rest], dim)
