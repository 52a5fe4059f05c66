"""Modules that stand in a model for some of its own while ranks share its tokens.

They have no parameters, and what they stand for is their child `inner`, so that hooks on it, its
kernel and its repairs stay. A rank may hold tokens of several samples beside each other: what
belongs to a sample (tables of a timestep, keys of a text) is then applied piece by piece. Which
modules are swapped is the family's to say (its `sharding.py`). Read next: `grid`, `ulysses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.ring_attention import Ring
from everyframe.parallel.token_partition import SampleSegment, TokenPartition
from everyframe.parallel.ulysses import Core, Ulysses


class SequenceParallelAttention(Protocol):
    """Attention among ranks, as `Ulysses` and `Ring` do it."""

    def attend(
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The answers to this rank's tokens."""
        ...


def attending(way: str, deal: TokenPartition, team: Communicator) -> SequenceParallelAttention:
    """Attention of a grid (samples, heads, tokens) by one of `ATTENDING`."""
    return Ring(deal, team) if way == "ring" else Ulysses(deal, team)


class ShardedAttentionCore(nn.Module):
    """An attention's core whose tokens lie on several ranks: (b, heads, n, D) of this one's."""

    def __init__(self, inner: nn.Module, now: Callable[[], SequenceParallelAttention]) -> None:
        super().__init__()
        self.inner = inner
        self._now = now

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._now().attend(self.inner, q, k, v, mask)


class PerSample(nn.Module):
    """A module of the stream (so many times) and of tables (B, ...), sample by sample.

    `dim` is that of the stream along which tokens of several samples may lie.
    """

    def __init__(
        self,
        inner: nn.Module,
        num_streams: int,
        dim: int,
        now: Callable[[], Sequence[SampleSegment]],
    ) -> None:
        super().__init__()
        self.inner = inner
        self._num_streams, self._dim, self._now = num_streams, dim, now

    def forward(self, *given: Tensor) -> Tensor:
        streams, tables = given[: self._num_streams], given[self._num_streams :]

        def one(segment: SampleSegment) -> Tensor:
            here = segment.here
            mine = [x.narrow(self._dim, here.start, here.stop - here.start) for x in streams]
            out: Tensor = self.inner(*mine, *(of_samples(t, segment) for t in tables))
            return out

        return beside([one(segment) for segment in self._now()], self._dim)


class CrossAttentionPerSample(nn.Module):
    """A cross-attention's core: every token looks at the text of its own sample.

    Queries are (b, heads, frames * s, D): s places of so many frames, one where all tokens of a
    sample are one row.
    """

    def __init__(
        self,
        inner: nn.Module,
        now: Callable[[], Sequence[SampleSegment]],
        frames: Callable[[], int],
    ) -> None:
        super().__init__()
        self.inner = inner
        self._now, self._frames = now, frames

    def forward(self, q_bHND: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        frames = self._frames()
        q_bHTsD = torch.unflatten(q_bHND, 2, (frames, q_bHND.shape[2] // frames))

        def one(segment: SampleSegment) -> Tensor:
            q = q_bHTsD[:, :, :, segment.here].flatten(2, 3)
            told = (of_samples(each, segment) for each in (k, v))
            out: Tensor = self.inner(q, *told, None if mask is None else of_samples(mask, segment))
            return torch.unflatten(out, 2, (frames, q.shape[2] // frames))

        return beside([one(segment) for segment in self._now()], 3).flatten(2, 3)


def of_samples(table: Tensor, segment: SampleSegment) -> Tensor:
    """A table's samples that a segment is of; one for all stays so."""
    return table if table.shape[0] == 1 else table[segment.samples]


def beside(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts one behind the other; one part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
