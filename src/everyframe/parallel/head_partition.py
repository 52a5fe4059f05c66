"""Attention of all tokens to all, dealt out over ranks: who looks with which heads from where.

Tokens are held as a `TokenPartition` of samples, heads and tokens has its columns. The work of
attention is dealt out as one long list, sample after sample and head after head. Heads stay whole
where that gives nobody a tenth more than its share; else the list is cut anywhere, so that several
ranks share a head by its queries, and no number of heads leaves a rank without work.

Numbers only, no tensors. Read next: `ulysses`, which moves tensors so, and `ring`, which needs no
heads at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from everyframe.parallel.token_partition import TokenPartition, cut

#: Ways to attend from all tokens to all among ranks.
ATTENDING = ("ulysses", "ring")

#: Heads are cut where a rank would have so many times its share with whole ones.
_FAIR = Fraction(11, 10)


@dataclass(frozen=True)
class HeadBlock:
    """Some heads of a sample and those of their queries that look, at all tokens of the sample."""

    sample: int
    heads: range
    queries: range


@dataclass(frozen=True)
class KeyBlock:
    """Heads of a sample whose keys and values a rank needs, of all tokens."""

    sample: int
    heads: range


@dataclass(frozen=True)
class HeadPartition:
    """The attention of a grid (samples, heads, tokens) dealt out over the ranks of `deal`.

    What is sent is counted in vectors: one token's channels of one head.
    """

    deal: TokenPartition

    @cached_property
    def cuts_heads(self) -> bool:
        """Whether ranks share heads."""
        tokens = self.deal.grid.places
        return any(
            len(rows) * tokens > _FAIR * len(cells)
            for rows, cells in zip(self.deal.rows, self.deal.cells, strict=True)
        )

    @cached_property
    def bricks(self) -> tuple[tuple[HeadBlock, ...], ...]:
        """The work of each rank: of every sample three bricks at most, one of whole heads."""
        tokens = self.deal.grid.places
        if self.cuts_heads:
            spans = self.deal.cells
        else:
            spans = tuple(range(r.start * tokens, r.stop * tokens) for r in self.deal.rows)
        return tuple(tuple(self._bricks(span)) for span in spans)

    @cached_property
    def keys(self) -> tuple[tuple[KeyBlock, ...], ...]:
        """What each rank looks at, sample by sample."""
        return tuple(tuple(_merged(bricks)) for bricks in self.bricks)

    def queries_sent(self, source: int, target: int) -> int:
        """Vectors of queries that a rank holds and another works with; as many answers go back."""
        held = {each.sample: each.places for each in self.deal.held[source]}
        return sum(
            len(brick.heads) * len(overlap(brick.queries, held[brick.sample]))
            for brick in self.bricks[target]
            if brick.sample in held
        )

    def keys_sent(self, source: int, target: int) -> int:
        """Vectors of keys that a rank holds and another looks at; as many of values go along."""
        held = {each.sample: len(each.places) for each in self.deal.held[source]}
        return sum(len(keys.heads) * held.get(keys.sample, 0) for keys in self.keys[target])

    def moved(self, rank: int) -> int:
        """Vectors that leave a rank: queries, keys and values of others' work, and its answers."""
        others = [other for other in range(self.deal.num_ranks) if other != rank]
        there = sum(self.queries_sent(rank, q) + 2 * self.keys_sent(rank, q) for q in others)
        return there + sum(self.queries_sent(p, rank) for p in others)

    def share(self, rank: int) -> float:
        """The part (0..1) of all of this attention's work that is a rank's."""
        grid = self.deal.grid
        mine = sum(len(brick.heads) * len(brick.queries) for brick in self.bricks[rank])
        return mine / grid.num_tokens

    def _bricks(self, span: range) -> Iterator[HeadBlock]:
        heads, tokens = self.deal.grid.frames, self.deal.grid.places
        for sample, start, stop in cut(span, heads * tokens):
            first, begin = divmod(start, tokens)
            last, end = divmod(stop, tokens)
            if first == last:
                yield HeadBlock(sample, range(first, first + 1), range(begin, end))
                continue
            if begin:
                yield HeadBlock(sample, range(first, first + 1), range(begin, tokens))
                first += 1
            if first < last:
                yield HeadBlock(sample, range(first, last), range(tokens))
            if end:
                yield HeadBlock(sample, range(last, last + 1), range(end))


def sent_vectors(deal: TokenPartition, rank: int) -> int:
    """Vectors of keys and values that leave a rank at each attention where they go round."""
    mine = {each.sample: each for each in deal.held[rank]}
    tokens = sum(
        len(mine[theirs.sample].places)
        for other in range(deal.num_ranks)
        if other != rank
        for theirs in deal.held[other]
        if theirs.sample in mine
    )
    return 2 * tokens * deal.grid.frames


def overlap(one: range, other: range) -> range:
    """What two ranges have in common; an empty one where that is nothing."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def within(part: range, whole: range) -> slice:
    """Where a part of a range lies in it."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _merged(bricks: tuple[HeadBlock, ...]) -> Iterator[KeyBlock]:
    samples: dict[int, range] = {}
    for brick in bricks:
        first = samples.get(brick.sample, brick.heads)
        samples[brick.sample] = range(first.start, brick.heads.stop)
    for sample, heads in samples.items():
        yield KeyBlock(sample, heads)
