"""Ulysses attention: all-to-all so that each rank has some heads of every token.

One uneven all-to-all brings the queries, keys and values of its heads to a rank, another returns
the results: 4 N (P - 1) / P^2 vectors a rank with equal shares of N tokens over P ranks. Heads and
tokens need not be divisible and nothing is padded. Each result is one softmax over all keys,
computed by the kernel that one device would use. If there are too few heads, several ranks share
one by its queries (`head_partition`). Idea: DeepSpeed Ulysses (arXiv 2309.14509), which needs
divisible heads.

Shapes: (b, heads, n, D) of a rank's own tokens, as `token_partition` splits them: b samples with n
tokens each, or b = 1 and tokens of several samples concatenated. A mask broadcasts to (B, heads, N,
N) of the whole batch, and every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.head_partition import HeadBlock, HeadPartition, KeyBlock, overlap, within
from everyframe.parallel.token_partition import TokenPartition

Core = Callable[..., Tensor]
"""``core(q, k, v, mask)``: attention of queries (B, heads, Q, D) to keys (B, heads, L, D)."""


class Ulysses:
    """Ulysses attention of one grid (samples, heads, tokens) on one rank."""

    def __init__(self, partition: TokenPartition, group: Communicator) -> None:
        assert partition.num_ranks == group.size
        self.partition, self.group = partition, group
        self._heads = HeadPartition(partition)
        self._held = partition.held
        ranks = range(group.size)
        self._back = [[self._heads.queries_sent(q, p) for q in ranks] for p in ranks]
        self._there = [
            [self._heads.queries_sent(p, q) + 2 * self._heads.keys_sent(p, q) for q in ranks]
            for p in ranks
        ]
        self._is_alone = not any(
            self._there[p][q] for p in ranks for q in ranks if p != q and group.rank in (p, q)
        )
        if self._is_alone:  # what it would send itself stays where it is
            self._there[group.rank][group.rank] = self._back[group.rank][group.rank] = 0

    def attend(
        self, core: Core, q_bHnD: Tensor, k_bHnD: Tensor, v_bHnD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Results (b, heads, n, D) of `core` for this rank's tokens, in the dtype of `v`."""
        # Sent in the precision to which attention would cast it.
        q, k = q_bHnD.to(v_bHnD.dtype), k_bHnD.to(v_bHnD.dtype)
        if self._is_alone:
            return self._alone(core, q, k, v_bHnD, mask)
        ranks, mine = range(self.group.size), self.group.rank
        parts = (part for p in ranks for part in self._select_sent(p, q, k, v_bHnD))
        sent = _pack(parts, sum(self._there[mine]), v_bHnD)
        came = self.group.all_to_all(sent, self._there, "heads are gathered")
        del sent
        queries, seen = self._arrange(came)
        del came
        answers = [
            core(*self._inputs(brick, query, seen), _mask_of(mask, brick))[0]
            for brick, query in zip(self._bricks, queries, strict=True)
        ]
        del queries, seen
        parts = (part for p in ranks for part in self._select_returned(p, answers))
        back = _pack(parts, sum(self._back[mine]), v_bHnD)
        back = self.group.all_to_all(back, self._back, "heads are given back")
        return self._own(back, v_bHnD)

    @property
    def _bricks(self) -> Sequence[HeadBlock]:
        return self._heads.bricks[self.group.rank]

    def _alone(self, core: Core, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute whole samples, or nothing, on this rank; nothing is exchanged."""
        nothing = v.new_empty(0, v.shape[-1])
        self.group.all_to_all(nothing, self._there, "heads are gathered")
        if mask is not None and mask.shape[0] > 1:
            mask = mask[self.partition.samples(self.group.rank)]
        answer = core(q, k, v, mask)
        self.group.all_to_all(nothing, self._back, "heads are given back")
        return answer

    def _select_sent(self, target: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        """What `target` receives of this rank's tokens (H, n, D): queries, then keys and values."""
        mine = {each.sample: each for each in self._held[self.group.rank]}
        for brick in self._heads.bricks[target]:
            if brick.sample in mine:
                held = mine[brick.sample]
                here = held.start + within(overlap(brick.queries, held.places), held.places).start
                stop = here + len(overlap(brick.queries, held.places))
                yield q[held.row, _slice(brick.heads), here:stop]
        for keys in self._heads.keys[target]:
            if keys.sample in mine:
                held = mine[keys.sample]
                for each in (k, v):
                    yield each[held.row, _slice(keys.heads), held.here]

    def _arrange(self, came: Tensor) -> tuple[list[Tensor], dict[int, tuple[KeyBlock, Tensor]]]:
        """Queries of each block (H, Q, D), and keys and values (2, H, N, D) by sample."""
        tokens, width = self.partition.grid.places, came.shape[-1]
        mine = self._heads.keys[self.group.rank]
        queries = [came.new_empty(len(b.heads), len(b.queries), width) for b in self._bricks]
        seen = {
            keys.sample: (keys, came.new_empty(2, len(keys.heads), tokens, width)) for keys in mine
        }
        taken = _Taken(came)
        for source in self._held:
            held = {each.sample: each.places for each in source}
            for brick, into in zip(self._bricks, queries, strict=True):
                if brick.sample in held:
                    part = overlap(brick.queries, held[brick.sample])
                    taken.into(into[:, within(part, brick.queries)])
            for keys, both in seen.values():
                if keys.sample in held:
                    places = held[keys.sample]
                    for into in both[:, :, _slice(places)]:
                        taken.into(into)
        return queries, seen

    def _inputs(
        self, brick: HeadBlock, query_HQD: Tensor, seen: dict[int, tuple[KeyBlock, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (1, heads, ., D) of one block."""
        keys, both = seen[brick.sample]
        k, v = both[:, within(brick.heads, keys.heads)]
        return query_HQD[None], k[None], v[None]

    def _select_returned(self, holder: int, answers: Sequence[Tensor]) -> Iterator[Tensor]:
        """What `holder` receives of this rank's results (H, n, D)."""
        held = {each.sample: each.places for each in self._held[holder]}
        for brick, answer in zip(self._bricks, answers, strict=True):
            if brick.sample in held:
                part = overlap(brick.queries, held[brick.sample])
                yield answer[:, within(part, brick.queries)]

    def _own(self, back: Tensor, like_bHnD: Tensor) -> Tensor:
        """The results of this rank's own queries, in place."""
        out = torch.empty_like(like_bHnD, memory_format=torch.contiguous_format)
        mine = {each.sample: each for each in self._held[self.group.rank]}
        taken = _Taken(back)
        for bricks in self._heads.bricks:
            for brick in bricks:
                if brick.sample in mine:
                    held = mine[brick.sample]
                    part = overlap(brick.queries, held.places)
                    start = held.start + within(part, held.places).start
                    taken.into(out[held.row, _slice(brick.heads), start : start + len(part)])
        return out


def _pack(parts_HnD: Iterable[Tensor], num_vectors: int, like: Tensor) -> Tensor:
    """Copy all parts into one tensor of vectors (num_vectors, D)."""
    packed, at = like.new_empty(num_vectors, like.shape[-1]), 0
    for part in parts_HnD:
        stop = at + part.shape[0] * part.shape[1]
        packed[at:stop].view(part.shape).copy_(part)
        at = stop
    assert at == num_vectors, f"{at} vectors to send, {num_vectors} declared"
    return packed


class _Taken:
    """Read vectors (n, D) from the front, one block after the other."""

    def __init__(self, vectors: Tensor) -> None:
        self._vectors, self._at = vectors, 0

    def into(self, place_HnD: Tensor) -> None:
        heads, tokens, width = place_HnD.shape
        stop = self._at + heads * tokens
        place_HnD.copy_(self._vectors[self._at : stop].view(heads, tokens, width))
        self._at = stop


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def part_of_mask(mask: Tensor | None, wanted: Mapping[int, range]) -> Tensor | None:
    """The part of a mask in these ranges by dimension; a dimension of length 1 applies to all."""
    for dim, part in wanted.items() if mask is not None else ():
        assert mask is not None
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, part.start, len(part))
    return mask


def _mask_of(mask: Tensor | None, brick: HeadBlock) -> Tensor | None:
    """The part of a mask for a block."""
    sample = range(brick.sample, brick.sample + 1)
    return part_of_mask(mask, {0: sample, 1: brick.heads, 2: brick.queries})
