"""Modules that replace some of a model's own while ranks share its tokens.

They have no parameters. The replaced module is their child `inner`, so its hooks, kernel and
repairs remain. A rank may hold tokens of several samples side by side; inputs of one sample
(timestep tables, text keys) are then applied segment by segment. A family's `sharding.py` decides
which modules are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.ring_attention import Ring
from everyframe.parallel.token_partition import SampleSegment, TokenPartition
from everyframe.parallel.ulysses import Core, Ulysses


class SequenceParallelAttention(Protocol):
    """Sequence-parallel attention, such as `Ulysses` and `Ring`."""

    def attend(
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention results for this rank's tokens."""
        ...


def sequence_attention(
    backend: str, partition: TokenPartition, group: Communicator
) -> SequenceParallelAttention:
    """Attention over a grid (samples, heads, tokens); `backend` is of `SEQUENCE_BACKENDS`."""
    return Ring(partition, group) if backend == "ring" else Ulysses(partition, group)


class ReplacingModule(nn.Module):
    """A module around `inner`, for the patch whose method `_now` is."""

    _now: Callable[[], Any]

    @property
    def is_transparent(self) -> bool:
        """Whether it computes what `inner` does; see `ModelPatch.is_transparent`."""
        return bool(getattr(getattr(self._now, "__self__", None), "is_transparent", False))


class ShardedAttentionCore(ReplacingModule):
    """Attention core over tokens of all ranks; inputs (b, heads, n, D) are this rank's."""

    def __init__(self, inner: nn.Module, now: Callable[[], SequenceParallelAttention]) -> None:
        super().__init__()
        self.inner = inner
        self._now = now

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self._now().attend(self.inner, q, k, v, mask)
        return out


class PerSample(ReplacingModule):
    """Apply a module segment by segment, with the tables (B, ...) of each segment's samples.

    The first `num_streams` inputs are hidden states, whose dimension `dim` may hold tokens of
    several samples; the others are tables.
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
            out: Tensor = self.inner(*mine, *(sample_rows(t, segment) for t in tables))
            return out

        return concatenate([one(segment) for segment in self._now()], self._dim)


class CrossAttentionPerSample(ReplacingModule):
    """Cross-attention core in which every token attends to the text of its own sample.

    Queries are (b, heads, frames * s, D): s places of so many frames; frames is 1 if all tokens of
    a sample form one row.
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
            keys_and_values = (sample_rows(each, segment) for each in (k, v))
            out: Tensor = self.inner(
                q, *keys_and_values, None if mask is None else sample_rows(mask, segment)
            )
            return torch.unflatten(out, 2, (frames, q.shape[2] // frames))

        return concatenate([one(segment) for segment in self._now()], 3).flatten(2, 3)


def sample_rows(table: Tensor, segment: SampleSegment) -> Tensor:
    """Rows of a table for a segment's samples; a table with one row is for all."""
    return table if table.shape[0] == 1 else table[segment.samples]


def concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
