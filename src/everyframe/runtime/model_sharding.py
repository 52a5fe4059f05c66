"""Sequence parallelism for denoisers: apply it to a loaded model from outside, and remove it.

Hooks and parameter-free child modules are swapped in; a single rank takes the same path. A rank is
called with the whole batch, computes its share of the samples' tokens
(`everyframe.parallel.token_partition`) and returns the whole result. Each family's `sharding.py`
defines the exchanges; the swapped modules are in `everyframe.parallel.sharded_modules`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.ops.text_context import JointTextContext, TextContext
from everyframe.parallel.communicator import Communicator, ParallelContext, SingleRank
from everyframe.parallel.redistribute import Redistribute
from everyframe.parallel.sharded_modules import (
    PerSample,
    SequenceParallelAttention,
    concatenate,
    sequence_attention,
)
from everyframe.parallel.token_partition import SampleSegment, TokenGrid, TokenPartition

_Patch = TypeVar("_Patch", bound="ModelPatch")


class ModelPatch:
    """Removable hooks and child modules on a model that the ranks of `group` run.

    Patch and model hold references to each other. A stage removes the patch when it is done
    (``with``), so that the model is freed with its last reference, without garbage collection.
    """

    def __init__(self, group: Communicator, groups: int) -> None:
        self.group, self._groups = group, groups
        self._swapped: list[tuple[nn.Module, str, nn.Module]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def is_transparent(self) -> bool:
        """Whether a module computes as without the patch: on one rank nothing is exchanged."""
        return self.group.size == 1

    def __enter__(self: _Patch) -> _Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove every hook and restore the model's own children."""
        for handle in self._handles:
            handle.remove()
        for part, name, child in self._swapped:
            setattr(part, name, child)
        self._handles, self._swapped = [], []

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context: run the module unsharded on this rank, with the same operations."""
        group, self.group = self.group, SingleRank()
        try:
            yield
        finally:
            self.group = group

    def _swap(self, part: nn.Module, name: str, ours: nn.Module) -> None:
        self._swapped.append((part, name, part.get_submodule(name)))
        setattr(part, name, ours)


class ShardedDenoiser(ModelPatch, ABC):
    """A denoiser on the ranks of a video; all ranks must apply it and call it in the same order.

    With several CFG groups the batch is first split among them, each with ranks of its own. Tokens
    lie along dimension `stream_dim` of the model's hidden states.
    """

    stream_dim: int

    def __init__(self, model: nn.Module, parallel: ParallelContext) -> None:
        super().__init__(parallel.video_group, parallel.num_cfg_groups)
        self._switches: dict[tuple[TokenGrid, Communicator], Redistribute] = {}
        self._switch: Redistribute | None = None
        self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))

    @abstractmethod
    def _grid_of(self, x_BCTHW: Tensor) -> TokenGrid:
        """The token grid of those latents."""

    @property
    def switch(self) -> Redistribute:
        """The redistribution of the current grid."""
        assert self._switch is not None, "the denoiser was not called as a whole"
        return self._switch

    def _swap_streams(self, part: nn.Module, streams: Mapping[type[nn.Module], int]) -> None:
        """Make each child of these types (with its number of token streams) work per sample."""
        for name, child in list(part.named_children()):
            if number := num_streams(child, streams):
                self._swap(part, name, PerSample(child, number, self.stream_dim, self._segments))

    def _segments(self) -> tuple[SampleSegment, ...]:
        return self.switch.segments

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Drop the samples from the call that this rank has no tokens of."""
        grid = self._grid_of(args[0])
        key = (grid, self.group)
        if key not in self._switches:
            groups = min(self._groups, self.group.size, grid.samples)
            self._switches[key] = Redistribute(
                TokenPartition(grid, self.group.weights, groups), self.group
            )
        self._switch = self._switches[key]
        mine = self._switch.samples
        mine_of = partial(_of_batch, samples=mine, batch=grid.samples)
        return tuple(map(mine_of, args)), {name: mine_of(each) for name, each in kwargs.items()}


class FullAttentionSharding(ShardedDenoiser):
    """Sharding of a denoiser whose tokens (B, N, C) of a sample all attend to each other."""

    stream_dim = 1

    def __init__(self, model: nn.Module, parallel: ParallelContext, num_heads: int) -> None:
        super().__init__(model, parallel)
        self._backend, self._num_heads = parallel.sequence_backend, num_heads
        self._attentions: dict[Redistribute, SequenceParallelAttention] = {}

    def _attention(self) -> SequenceParallelAttention:
        """Attention of the current grid."""
        switch = self.switch
        if switch not in self._attentions:
            rows = switch.partition
            grid = TokenGrid(rows.grid.samples, self._num_heads, rows.grid.places)
            partition = TokenPartition(grid, rows.weights, rows.groups)
            self._attentions[switch] = sequence_attention(self._backend, partition, switch.group)
        return self._attentions[switch]

    def _take_rotations(self, rope: nn.Module, args: tuple[Any, ...], table: Any) -> Any:
        """RoPE of this rank's tokens: of several samples in sequence, or one table for all."""
        parts = [each.places for each in self._segments()]
        cos, sin = (concatenate([x[part] for part in parts], 0) for x in (table.cos, table.sin))
        return table._replace(cos=cos, sin=sin)

    def _gather(self, layer: nn.Module, args: tuple[Any, ...], out_bnE: Tensor) -> Tensor:
        return self.switch.gather(out_bnE[:, None])[:, 0]


def num_streams(part: nn.Module, streams: Mapping[type[nn.Module], int]) -> int:
    """Number of token streams of a module of these types, 0 for others.

    Fast paths replace modules by subclasses before ranks share them.
    """
    return next((number for kind, number in streams.items() if isinstance(part, kind)), 0)


def _of_batch(value: Any, samples: slice, batch: int) -> Any:
    """Select samples of a denoiser argument; anything without a batch dimension stays unchanged."""
    if isinstance(value, (TextContext, JointTextContext)):
        return value.rows(samples.start, samples.stop)
    is_of_all = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
    return value[samples] if is_of_all else value
