"""An Open-Sora's denoiser on several ranks, put on from outside; one rank takes the same path.

Each rank holds some places of the frames, all frames of them (columns), so attention in time, to
the text and the feed-forward are computed where their tokens are. For attention in space alone
whole frames (rows) are dealt out, by one exchange before it and one after, and of the result only
the last projection, a few channels, is gathered. A rank may hold places of several samples, so the
branches of guidance come apart by themselves where there is a rank for each.

What is exchanged is in the precision that the next product would cast it to anyhow. Nothing is
padded and no sum is parted, so in exact arithmetic the result is that of one device.
Read next: `everyframe.parallel.grid`, `everyframe.parallel.switch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.families.opensora.blocks import Axis, CrossAttention, SelfAttention, token_grid
from everyframe.families.opensora.model import STDiT, STDiT3, TextContext
from everyframe.ops.modulation import GatedAdd, Modulate, PickFrames
from everyframe.parallel.grid import Deal, Grid, Segment
from everyframe.parallel.switch import Switch
from everyframe.parallel.team import Alone, Team

#: Modules without parameters that take the stream (so many times) and then tables of each sample.
_STREAMS: dict[type[nn.Module], int] = {Modulate: 1, GatedAdd: 2, PickFrames: 2}


def apply(model: STDiT | STDiT3, team: Team, groups: int = 1) -> Sharding:
    """Put `model` on the ranks of `team`; each must call it in the same order with the same input.

    With `groups` above 1 the batch is parted into so many first, each with ranks of its own.
    """
    return Sharding(model, team, groups)


class Sharding:
    """What `apply` has put on a denoiser; `remove` takes it off."""

    def __init__(self, model: STDiT | STDiT3, team: Team, groups: int) -> None:
        self.team, self._groups = team, groups
        self._patch_size = model.config.patch_size
        self._switches: dict[tuple[Grid, Team], Switch] = {}
        self._switch: Switch | None = None
        self._swapped: list[tuple[nn.Module, str, nn.Module]] = []
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.x_embedder.proj.register_forward_pre_hook(self._take_patches),
            model.add_positions.register_forward_pre_hook(self._take_positions),
            model.final_layer.register_forward_hook(self._gather),
        ]
        for part in list(model.modules()):
            if isinstance(part, SelfAttention) and part.axis is Axis.SPACE:
                self._handles.append(part.register_forward_pre_hook(self._to_rows))
                self._handles.append(part.register_forward_hook(self._to_columns))
            for name, child in list(part.named_children()):
                if type(child) in _STREAMS:
                    self._swap(part, name, child, _PerSegment(self, child))
            if isinstance(part, CrossAttention):
                self._swap(part, "core", part.core, _CorePerSegment(self, part.core))

    def remove(self) -> None:
        """Take off every hook, and give the model its own children back."""
        for handle in self._handles:
            handle.remove()
        for part, name, child in self._swapped:
            setattr(part, name, child)
        self._handles, self._swapped = [], []

    def _swap(self, part: nn.Module, name: str, child: nn.Module, ours: nn.Module) -> None:
        setattr(part, name, ours)
        self._swapped.append((part, name, child))

    @property
    def switch(self) -> Switch:
        """That of the grid which is computed now."""
        assert self._switch is not None, "the denoiser was not called as a whole"
        return self._switch

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, every rank computes everything by itself: the same call, the same operations."""
        team, self.team = self.team, Alone()
        try:
            yield
        finally:
            self.team = team

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call without the samples that this rank has no part of."""
        x_BCTHW = args[0]
        frames, rows, columns = token_grid(tuple(x_BCTHW.shape[2:]), self._patch_size)
        grid = Grid(x_BCTHW.shape[0], frames, rows * columns)
        key = (grid, self.team)
        if key not in self._switches:
            groups = min(self._groups, self.team.size, grid.samples)
            self._switches[key] = Switch(Deal(grid, self.team.weights, groups), self.team)
        self._switch = self._switches[key]
        mine = self._switch.samples
        mine_of = partial(_of_batch, samples=mine, batch=grid.samples)
        return tuple(map(mine_of, args)), {name: mine_of(each) for name, each in kwargs.items()}

    def _take_patches(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return self.switch.take(args[0])

    def _take_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        x, positions = args
        samples = self.switch.samples
        shape = (samples.stop - samples.start, 1, *positions.shape[-2:])
        return x, self.switch.take(positions.expand(shape))

    def _to_rows(self, attention: SelfAttention, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        dtype = attention.qkv.weight.dtype
        if dtype.itemsize < x.dtype.itemsize:
            x = x.to(dtype)  # as its first product would do; half the bytes to send
        return (self.switch.to_rows(x), *others)

    def _to_columns(self, attention: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.switch.to_columns(out)

    def _gather(self, layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.switch.gather(out)


class _PerSegment(nn.Module):
    """A module of the stream and of tables (B, ...), for a rank that holds some of the samples."""

    def __init__(self, sharding: Sharding, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._sharding = sharding
        self._num_streams = _STREAMS[type(inner)]

    def forward(self, *given: Tensor) -> Tensor:
        streams, tables = given[: self._num_streams], given[self._num_streams :]

        def one(segment: Segment) -> Tensor:
            mine = [x[:, :, segment.here] for x in streams]
            out: Tensor = self.inner(*mine, *(_of_samples(t, segment) for t in tables))
            return out

        return _beside([one(segment) for segment in self._sharding.switch.segments], 2)


class _CorePerSegment(nn.Module):
    """A cross-attention's core: every token looks at the text of its own sample."""

    def __init__(self, sharding: Sharding, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._sharding = sharding

    def forward(self, q_bHND: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        switch = self._sharding.switch
        frames = switch.deal.grid.frames
        q_bHTsD = torch.unflatten(q_bHND, 2, (frames, q_bHND.shape[2] // frames))

        def one(segment: Segment) -> Tensor:
            q = q_bHTsD[:, :, :, segment.here].flatten(2, 3)
            told = (_of_samples(each, segment) for each in (k, v))
            out: Tensor = self.inner(q, *told, None if mask is None else _of_samples(mask, segment))
            return torch.unflatten(out, 2, (frames, q.shape[2] // frames))

        return _beside([one(segment) for segment in switch.segments], 3).flatten(2, 3)


def _of_batch(value: Any, samples: slice, batch: int) -> Any:
    """Some samples of an argument of the denoiser; what is not of the batch stays as it is."""
    if isinstance(value, TextContext):
        return value.rows(samples.start, samples.stop)
    is_of_all = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
    return value[samples] if is_of_all else value


def _of_samples(table: Tensor, segment: Segment) -> Tensor:
    """A table's samples that a segment is of; one for all stays so."""
    return table if table.shape[0] == 1 else table[segment.samples]


def _beside(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
