"""Frame parallelism for the video UNet, applied from outside; one rank takes the same path.

Each rank holds whole frames, of any guidance branches, and computes all spatial work on them:
convolutions, spatial attention, feed-forwards. Around each temporal block, at every UNet level,
an all-to-all exchanges frames for pixels with all of their frames, and back. Temporal attention,
temporal convolutions and frame position embeddings then compute what one device would. The
remaining case is a norm over all frames and pixels of a branch: its statistics are merged among
the ranks that hold parts of that branch.

Heads are not split: 5, 10 and 20 heads divide by few numbers. Nothing is padded, and no sum except
that of a norm's statistics is split. Ranks beyond the number of frames hold pixels only.

Tensors are sent in the dtype that the next matrix product casts them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.families.svd.components import level_sizes
from everyframe.families.svd.layers import FrameLayout
from everyframe.families.svd.unet import VideoUNet
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.distributed_moments import DistributedMoments
from everyframe.parallel.redistribute import Redistribute
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.model_sharding import ModelPatch


class Sharding(ModelPatch):
    """The patch of a sharded UNet; all ranks must apply it and call it in the same order."""

    def __init__(self, unet: VideoUNet, parallel: ParallelContext) -> None:
        super().__init__(parallel.video_group, parallel.num_cfg_groups)
        self._num_levels = len(unet.down_blocks)
        self._dealt: dict[tuple[Communicator, tuple[int, ...]], ShardedFrames] = {}
        self._now: ShardedFrames | None = None
        self._handles += [
            unet.register_forward_pre_hook(self._begin, with_kwargs=True),
            unet.register_forward_hook(self._gather),
        ]

    def _begin(
        self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the call's input by this rank's frames and what it needs of their branches."""
        self._now = None
        if self.group.size == 1:
            return args, kwargs
        sample, timestep, context = args
        branches, frames, _, height, width = sample.shape
        key = (self.group, (branches, frames, height, width))
        if key not in self._dealt:
            places = [h * w for h, w in level_sizes(height, width, self._num_levels)]
            groups = min(self._groups, self.group.size, branches)
            self._dealt[key] = ShardedFrames((branches, frames), places, self.group, groups)
        self._now = dealt = self._dealt[key]
        mine = dealt.branches
        here = (dealt.take(sample), timestep[mine], context.rows(mine))
        return here, {**kwargs, "layout": dealt}

    def _gather(self, unet: nn.Module, args: tuple[Any, ...], v: Tensor) -> Tensor:
        return v if self._now is None else self._now.gather(v)


class ShardedFrames(FrameLayout):
    """One rank's share of (branches, frames), at each UNet level."""

    def __init__(
        self, shape: tuple[int, int], places: Sequence[int], group: Communicator, groups: int
    ) -> None:
        self.group, self._shape = group, shape
        partitions = [
            TokenPartition(TokenGrid(*shape, size), group.weights, groups) for size in places
        ]
        self._levels = {partition.grid.places: _Level(partition, group) for partition in partitions}
        self._level = self._levels[places[0]]
        all_rows = partitions[0].rows  # frames are dealt out alike at every level
        self._rows = all_rows[group.rank]
        self._sizes = [len(rows) for rows in all_rows]
        self._frames = _Owned(self._rows, shape[1])
        self._moments = DistributedMoments(all_rows, shape[1], group)
        owned = [self._frames, *(level.pixels for level in self._levels.values())]
        touched = [branch for each in owned for branch in each.branches]
        # A rank without frames calls the UNet too, with some branch's tables.
        self.branches = slice(min(touched, default=0), max(touched, default=0) + 1)
        self.frame_statistics = self._statistics_of_frames
        self.pixel_statistics = self._statistics_of_pixels

    def take(self, sample_BTCHW: Tensor) -> Tensor:
        """This rank's frames: (b, T, ...) for whole branches, else (1, r, ...)."""
        return self._to_branches(sample_BTCHW.flatten(0, 1)[self._rows.start : self._rows.stop])

    def gather(self, v_brCHW: Tensor) -> Tensor:
        """Gather the frames of all ranks, (B, T, ...), on every rank."""
        mine = v_brCHW.flatten(0, 1)
        every = self.group.gather(mine, self._sizes, "the answer is gathered")
        return torch.unflatten(every, 0, self._shape)

    def over_time(self, x_brSC: Tensor, reader: nn.Module | None = None) -> Tensor:
        """See `FrameLayout`; sends in the dtype that `reader` would cast to."""
        self._level = self._levels[x_brSC.shape[2]]
        if reader is not None:
            dtype = next(reader.parameters()).dtype
            if dtype.itemsize < x_brSC.dtype.itemsize:
                x_brSC = x_brSC.to(dtype)
        return self._level.switch.to_columns(x_brSC)

    def over_space(self, x_bTsC: Tensor) -> Tensor:
        return self._to_branches(self._level.switch.to_rows(x_bTsC).flatten(0, 1))

    def of_frames(self, table_BC: Tensor) -> Tensor:
        return self._to_branches(self._frames.each(table_BC, self.branches.start))

    def of_pixels(self, table_BC: Tensor) -> Tensor:
        level, first = self._level, self.branches.start
        if level.moments.is_whole:
            return level.pixels.all(table_BC, first)[:, None, None]
        return level.pixels.each(table_BC, first)[None, None]

    def _to_branches(self, x: Tensor) -> Tensor:
        """Reshape frames (r, ...) to (b, T, ...) for whole branches, else to (1, r, ...)."""
        return torch.unflatten(x, 0, (-1, self._shape[1])) if self._moments.is_whole else x[None]

    def _statistics_of_frames(self, x_bCrHW: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
        found = self._moments.merge(x_bCrHW, 2, groups)
        if found is None:
            return None
        mean, variance = (self._frames.each(one).T[None, :, :, None, None] for one in found)
        return mean, variance

    def _statistics_of_pixels(self, x_bCThw: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
        level = self._level
        found = level.moments.merge(x_bCThw, 4, groups)
        if found is None:
            return None
        mean, variance = (level.pixels.each(one).T[None, :, None, None] for one in found)
        return mean, variance


class _Level:
    """State of one UNet level."""

    def __init__(self, partition: TokenPartition, group: Communicator) -> None:
        self.switch = Redistribute(partition, group)
        self.moments = DistributedMoments(partition.columns, partition.grid.places, group)
        self.pixels = _Owned(partition.columns[group.rank], partition.grid.places)


class _Owned:
    """Branch of each frame or pixel in a span; a branch has `length` of them."""

    def __init__(self, span: range, length: int) -> None:
        first, stop = (span.start // length, -(-span.stop // length)) if span else (0, 0)
        self.branches = range(first, stop)
        self._numbers = torch.arange(span.start, span.stop) // length - first
        self._on_device: dict[str, Tensor] = {}

    def each(self, table: Tensor, start: int | None = None) -> Tensor:
        """The branch's row of `table` for each item of the span; rows are branches from `start` on.

        Without `start`, rows are the branches that the span touches.
        """
        device = str(table.device)
        if device not in self._on_device:
            self._on_device[device] = self._numbers.to(table.device)
        return self.all(table, start)[self._on_device[device]]

    def all(self, table: Tensor, start: int | None = None) -> Tensor:
        """Rows of all branches that the span touches."""
        if start is None or not self.branches:
            return table
        return table[self.branches.start - start : self.branches.stop - start]
