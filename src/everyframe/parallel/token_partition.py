"""Partition the tokens of a batch of videos over ranks, by place or by frame.

A batch has B samples of T frames of S places. A *column* is one place of one sample in all frames;
a *row* is one frame of one sample with all places. Layers that work on columns alone (temporal
attention, cross-attention, feed-forward) run on the column partition, layers that work on rows
(spatial attention) on the row partition. Both split one long list, sample after sample, so shares
are as even as possible for any B, T and S; with one rank per sample nothing has to move. Numbers
only, no tensors; `redistribute` moves tokens from columns to rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from everyframe.parallel.uneven_split import group_ranks, uneven_ranges, uneven_sizes


@dataclass(frozen=True)
class TokenGrid:
    """Samples, frames and places of a batch (B, T, S)."""

    samples: int
    frames: int
    places: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all samples."""
        return self.samples * self.frames * self.places


@dataclass(frozen=True)
class SampleSegment:
    """Some samples with the same places of each; `here` is their position in the rank's own part.

    Samples are counted among those that the rank has tokens of, `here` in columns.
    """

    samples: slice
    places: slice
    here: slice


@dataclass(frozen=True)
class LocalTokens:
    """Places of one sample that a rank holds, and their position in its own part.

    `row` is the index of the sample in that part, `start` where the places begin there.
    """

    sample: int
    places: range
    row: int
    start: int

    @property
    def here(self) -> slice:
        """Position of these places in the rank's own part."""
        return slice(self.start, self.start + len(self.places))


@dataclass(frozen=True)
class TokenPartition:
    """A grid split over ranks in proportion to their `weights`.

    With `groups` above 1 the samples are split first, and each group has ranks of its own (CFG
    groups). Otherwise all ranks share all samples, each rank as few as possible.
    """

    grid: TokenGrid
    weights: tuple[float, ...]
    groups: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including idle ones."""
        return len(self.weights)

    @cached_property
    def columns(self) -> tuple[range, ...]:
        """Each rank's columns, counted through all samples (B * S)."""
        return self._dealt(self.grid.places)

    @cached_property
    def rows(self) -> tuple[range, ...]:
        """Each rank's rows, counted through all samples (B * T)."""
        return self._dealt(self.grid.frames)

    @cached_property
    def cells(self) -> tuple[range, ...]:
        """Each rank's share of the rows if they may be cut anywhere (B * T * S tokens)."""
        return self._dealt(self.grid.frames * self.grid.places)

    def samples(self, rank: int) -> slice:
        """Samples that a rank has columns of; a single one if it has no columns."""
        mine, places = self.columns[rank], self.grid.places
        if not mine:
            return slice(0, 1)
        return slice(mine.start // places, (mine.stop - 1) // places + 1)

    def segments(self, rank: int) -> tuple[SampleSegment, ...]:
        """A rank's columns by sample; one segment if all of its samples have the same places.

        Never empty: a rank without columns has one segment of no places.
        """
        mine, places = self.columns[rank], self.grid.places
        pieces = list(cut(mine, places))
        if not pieces:
            return (SampleSegment(slice(0, 1), slice(0, 0), slice(0, 0)),)
        first = pieces[0]
        if all(piece[1:] == first[1:] for piece in pieces):
            _, start, stop = first
            here = slice(0, stop - start)
            return (SampleSegment(slice(0, len(pieces)), slice(start, stop), here),)
        segments = []
        for number, (sample, start, stop) in enumerate(pieces):
            begin = sample * places + start - mine.start
            here = slice(begin, begin + stop - start)
            segments.append(SampleSegment(slice(number, number + 1), slice(start, stop), here))
        return tuple(segments)

    @cached_property
    def held(self) -> tuple[tuple[LocalTokens, ...], ...]:
        """Each rank's columns by sample; empty for a rank without columns."""
        return tuple(self._local_tokens(rank) for rank in range(self.num_ranks))

    def _local_tokens(self, rank: int) -> tuple[LocalTokens, ...]:
        mine, places = self.columns[rank], self.grid.places
        pieces = list(cut(mine, places))
        if len(self.segments(rank)) == 1:  # each sample is a row of its own
            return tuple(
                LocalTokens(s, range(a, b), row, 0) for row, (s, a, b) in enumerate(pieces)
            )
        return tuple(
            LocalTokens(s, range(a, b), 0, s * places + a - mine.start) for s, a, b in pieces
        )

    def num_sent(self, rank: int) -> int:
        """Tokens that a rank sends to others from columns to rows and back."""
        grid, kept = self.grid, 0
        rows = {sample: range(a, b) for sample, a, b in cut(self.rows[rank], grid.frames)}
        for sample, start, stop in cut(self.columns[rank], grid.places):
            kept += (stop - start) * len(rows.get(sample, ()))
        held = len(self.columns[rank]) * grid.frames + len(self.rows[rank]) * grid.places
        return held - 2 * kept

    def _dealt(self, length: int) -> tuple[range, ...]:
        """Split B * `length` items, sample by sample."""
        parts = uneven_sizes(self.grid.samples, [1] * self.groups)
        dealt: list[range] = []
        start = 0
        for part, ranks in zip(
            parts, group_ranks(self.num_ranks, parts, self.weights), strict=True
        ):
            dealt += uneven_ranges(part * length, [self.weights[rank] for rank in ranks], start)
            start += part * length
        return tuple(dealt)


@dataclass(frozen=True)
class UnevenTokenPartition(TokenPartition):
    """One sample whose columns are already split: `lengths` are the ranks' numbers, in order.

    Several kinds of tokens, each split by the weights and then concatenated, give shares that a
    split of the whole would not give. Rows and cells are split by the weights.
    """

    lengths: tuple[int, ...] = ()

    @cached_property
    def columns(self) -> tuple[range, ...]:
        """See `TokenPartition`."""
        assert self.grid.samples == 1
        assert sum(self.lengths) == self.grid.places
        bounds = accumulate(self.lengths, initial=0)
        return tuple(range(low, high) for low, high in pairwise(bounds))


def cut(span: Sequence[int], length: int) -> Iterator[tuple[int, int, int]]:
    """Split a range through all samples into (sample, start, stop) pieces."""
    at = span[0] if span else 0
    end = at + len(span)
    while at < end:
        sample, start = divmod(at, length)
        stop = min(length, start + end - at)
        yield sample, start, stop
        at += stop - start
