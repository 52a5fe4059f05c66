"""The tokens of several videos and how they are dealt out over ranks: by places, or by frames.

A batch of videos has B samples of T frames of S places. A *column* is one place of one sample
through all of its frames, a *row* one frame of one sample with all of its places. What works on
columns alone (attention in time, to a text, a feed-forward) runs where the columns are, what works
on rows where the rows are. Both are dealt out as one long list, sample after sample, so shares are
as even as can be whatever B, T and S are; with a rank a sample nothing has to move at all.

Numbers only, no tensors. Read next: `switch`, which moves tokens from columns to rows.
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
        """All of them."""
        return self.samples * self.frames * self.places


@dataclass(frozen=True)
class SampleSegment:
    """Some samples' places, the same for each; `here` is where they lie in the rank's own part.

    Samples are counted among those that the rank has any of, `here` in columns.
    """

    samples: slice
    places: slice
    here: slice


@dataclass(frozen=True)
class LocalTokens:
    """The places of one sample that a rank has, and where in its own part they lie.

    `row` counts the samples of its part, `start` is where these places begin there.
    """

    sample: int
    places: range
    row: int
    start: int

    @property
    def here(self) -> slice:
        """These places in the rank's own part."""
        return slice(self.start, self.start + len(self.places))


@dataclass(frozen=True)
class TokenPartition:
    """A grid dealt out over ranks of these weights.

    With `groups` above 1 the samples are parted first and each part has ranks of its own (guidance
    branches apart); else all ranks share in all samples, each in as few as can be.
    """

    grid: TokenGrid
    weights: tuple[float, ...]
    groups: int = 1

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, those with nothing to do counted in."""
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
        """Each rank's part of the rows where they may be cut anywhere (B * T * S tokens)."""
        return self._dealt(self.grid.frames * self.grid.places)

    def samples(self, rank: int) -> slice:
        """The samples that a rank has any columns of; one of them where it has none."""
        mine, places = self.columns[rank], self.grid.places
        if not mine:
            return slice(0, 1)
        return slice(mine.start // places, (mine.stop - 1) // places + 1)

    def segments(self, rank: int) -> tuple[SampleSegment, ...]:
        """A rank's columns by sample; one segment where all of its samples have the same places.

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
        """Each rank's columns sample by sample; none where it has none."""
        return tuple(self._held(rank) for rank in range(self.num_ranks))

    def _held(self, rank: int) -> tuple[LocalTokens, ...]:
        mine, places = self.columns[rank], self.grid.places
        pieces = list(cut(mine, places))
        if len(self.segments(rank)) == 1:  # each sample is a row of its own
            return tuple(
                LocalTokens(s, range(a, b), row, 0) for row, (s, a, b) in enumerate(pieces)
            )
        return tuple(
            LocalTokens(s, range(a, b), 0, s * places + a - mine.start) for s, a, b in pieces
        )

    def moved(self, rank: int) -> int:
        """Tokens that a rank sends to others on the way from columns to rows and back."""
        grid, kept = self.grid, 0
        rows = {sample: range(a, b) for sample, a, b in cut(self.rows[rank], grid.frames)}
        for sample, start, stop in cut(self.columns[rank], grid.places):
            kept += (stop - start) * len(rows.get(sample, ()))
        held = len(self.columns[rank]) * grid.frames + len(self.rows[rank]) * grid.places
        return held - 2 * kept

    def _dealt(self, length: int) -> tuple[range, ...]:
        """B * `length` things dealt out, sample by sample."""
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
    """One sample whose columns lie as others have cut them: `lengths` of the ranks', in order.

    Several kinds of tokens beside each other, each dealt out by the weights, come to parts that
    all of them together would not have. Rows and cells are dealt out by the weights.
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
    """A range through all samples as (sample, start, stop) in each of them."""
    at = span[0] if span else 0
    end = at + len(span)
    while at < end:
        sample, start = divmod(at, length)
        stop = min(length, start + end - at)
        yield sample, start, stop
        at += stop - start
