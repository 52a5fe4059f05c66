"""Partition attention heads and queries over ranks for Ulysses attention.

The partition is a `TokenPartition` whose rows are heads and whose columns are tokens. All work is
one list, sample by sample and head by head. Heads stay whole if no rank then gets over 10 % more
than its share. Otherwise the list is cut inside heads: several ranks share a head's queries, so no
rank is idle whatever the number of heads. Numbers only, no tensors; `ulysses` moves the tensors.
`ring_attention` does not split heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from everyframe.parallel.token_partition import TokenPartition, cut

#: Sequence-parallel attention backends.
SEQUENCE_BACKENDS = ("ulysses", "ring")

#: Heads are cut if whole heads would give a rank over this multiple of its share.
_FAIR = Fraction(11, 10)


@dataclass(frozen=True)
class HeadBlock:
    """Heads of one sample with some of their queries, which attend to all tokens of the sample."""

    sample: int
    heads: range
    queries: range


@dataclass(frozen=True)
class KeyBlock:
    """Heads of one sample whose keys and values, of all tokens, a rank needs."""

    sample: int
    heads: range


@dataclass(frozen=True)
class HeadPartition:
    """Attention over a grid (samples, heads, tokens), partitioned over the ranks of `partition`.

    Traffic is counted in vectors: the channels of one token in one head.
    """

    partition: TokenPartition

    @cached_property
    def cuts_heads(self) -> bool:
        """Whether ranks share heads."""
        tokens = self.partition.grid.places
        return any(
            len(rows) * tokens > _FAIR * len(cells)
            for rows, cells in zip(self.partition.rows, self.partition.cells, strict=True)
        )

    @cached_property
    def bricks(self) -> tuple[tuple[HeadBlock, ...], ...]:
        """Blocks of each rank: at most three per sample, one of them whole heads."""
        tokens = self.partition.grid.places
        if self.cuts_heads:
            spans = self.partition.cells
        else:
            spans = tuple(range(r.start * tokens, r.stop * tokens) for r in self.partition.rows)
        return tuple(tuple(self._bricks(span)) for span in spans)

    @cached_property
    def keys(self) -> tuple[tuple[KeyBlock, ...], ...]:
        """Keys and values that each rank needs, sample by sample."""
        return tuple(tuple(_merge(bricks)) for bricks in self.bricks)

    def queries_sent(self, source: int, target: int) -> int:
        """Query vectors that `source` holds and `target` computes; as many results return."""
        held = {each.sample: each.places for each in self.partition.held[source]}
        return sum(
            len(brick.heads) * len(overlap(brick.queries, held[brick.sample]))
            for brick in self.bricks[target]
            if brick.sample in held
        )

    def keys_sent(self, source: int, target: int) -> int:
        """Key vectors that `source` holds and `target` needs; as many value vectors go along."""
        held = {each.sample: len(each.places) for each in self.partition.held[source]}
        return sum(len(keys.heads) * held.get(keys.sample, 0) for keys in self.keys[target])

    def num_sent(self, rank: int) -> int:
        """Vectors that leave a rank: queries, keys and values, and results of others' queries."""
        others = [other for other in range(self.partition.num_ranks) if other != rank]
        there = sum(self.queries_sent(rank, q) + 2 * self.keys_sent(rank, q) for q in others)
        return there + sum(self.queries_sent(p, rank) for p in others)

    def share(self, rank: int) -> float:
        """Fraction (0..1) of all attention work that the rank does."""
        grid = self.partition.grid
        mine = sum(len(brick.heads) * len(brick.queries) for brick in self.bricks[rank])
        return mine / grid.num_tokens

    def _bricks(self, span: range) -> Iterator[HeadBlock]:
        heads, tokens = self.partition.grid.frames, self.partition.grid.places
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


def sent_vectors(partition: TokenPartition, rank: int) -> int:
    """Key and value vectors that leave a rank in one ring attention."""
    mine = {each.sample: each for each in partition.held[rank]}
    tokens = sum(
        len(mine[theirs.sample].places)
        for other in range(partition.num_ranks)
        if other != rank
        for theirs in partition.held[other]
        if theirs.sample in mine
    )
    return 2 * tokens * partition.grid.frames


def overlap(one: range, other: range) -> range:
    """Intersection of two ranges; may be empty."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def within(part: range, whole: range) -> slice:
    """Position of a subrange within `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _merge(bricks: tuple[HeadBlock, ...]) -> Iterator[KeyBlock]:
    samples: dict[int, range] = {}
    for brick in bricks:
        first = samples.get(brick.sample, brick.heads)
        samples[brick.sample] = range(first.start, brick.heads.stop)
    for sample, heads in samples.items():
        yield KeyBlock(sample, heads)
