"""Ring attention: keys and values move between ranks, queries stay.

A rank's queries attend to the keys of one rank after the other, while the next keys are in
transfer; results are merged by log-sum-exp. Heads are not split, and a rank holds the keys of two
ranks at a time. Each rank sends 2 N (P - 1) / P vectors, P / 2 times as many as `ulysses`. The
kernel is SDPA's if it returns a log-sum-exp, else plain matrix products. In step i each rank sends
directly to the rank i places further, not around the ring: the bytes are the same, and a rank
receives only keys of samples of which it has tokens. Idea: Ring Attention (arXiv 2310.01889).

Shapes as in `ulysses`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from everyframe.ops.attention import attention_with_lse
from everyframe.ops.dtypes import float32_or_wider
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.pending import PendingReceive
from everyframe.parallel.token_partition import LocalTokens, TokenPartition
from everyframe.parallel.ulysses import Core, part_of_mask

#: Maximum number of attention scores in memory.
_SCORES = 1 << 25


class Partial(NamedTuple):
    """Results (B, heads, Q, D) over some of the keys, and their log-sum-exp (B, heads, Q).

    Both are float32 or wider. A query that may attend to none of these keys has zeros and minus
    infinity.
    """

    out: Tensor
    lse: Tensor


def partial_attention(
    q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
) -> Partial:
    """``softmax(q k^T / sqrt(D)) v`` over these keys.

    `mask` broadcasts to (B, heads, Q, L). A boolean mask is True where a query may attend; a
    floating one is added to the scores. SDPA's fused kernels round the result to the dtype of `v`
    before it is merged; the plain one does not.
    """
    wide = float32_or_wider(v_BHLD.dtype)
    if q_BHQD.shape[2] and k_BHLD.shape[2]:
        fused = attention_with_lse(q_BHQD, k_BHLD, v_BHLD, mask)
        if fused is not None:
            return Partial(*(part.to(wide) for part in fused))
    return plain_partial_attention(q_BHQD, k_BHLD, v_BHLD, mask)


def plain_partial_attention(
    q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
) -> Partial:
    """`partial_attention` by plain products in float32 or wider, some queries at a time."""
    wide = float32_or_wider(v_BHLD.dtype)
    batch, heads, length, width = q_BHQD.shape
    at_once = max(1, _SCORES // max(1, batch * heads * k_BHLD.shape[2]))
    k_BHDL, v_BHLD = k_BHLD.to(wide).mT, v_BHLD.to(wide)
    out = q_BHQD.new_empty((batch, heads, length, v_BHLD.shape[-1]), dtype=wide)
    lse = q_BHQD.new_empty((batch, heads, length), dtype=wide)
    if not k_BHLD.shape[2]:
        return Partial(out.zero_(), lse.fill_(-torch.inf))
    for start in range(0, length, at_once):
        here = slice(start, start + at_once)
        scores = (q_BHQD[:, :, here].to(wide) / math.sqrt(width)) @ k_BHDL
        if mask is not None:
            part = mask[:, :, here] if mask.shape[2] > 1 else mask
            is_choice = part.dtype == torch.bool
            scores = scores.masked_fill(~part, -torch.inf) if is_choice else scores + part
        top = _finite(scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        lse[:, :, here] = (top + total.log())[..., 0]
        # Queries without keys have zero weights, and a zero result.
        out[:, :, here] = (weights @ v_BHLD) / total.masked_fill(total == 0, 1)
    return Partial(out, lse)


def merge(one: Partial, other: Partial) -> Partial:
    """Combine attention over two sets of keys."""
    lse = torch.logaddexp(one.lse, other.lse)
    base = _finite(lse)
    weights = ((part.lse - base).exp()[..., None] for part in (one, other))
    first, second = (part.out * weight for part, weight in zip((one, other), weights, strict=True))
    return Partial(first + second, lse)


def _finite(x: Tensor) -> Tensor:
    """Replace minus infinity (no keys) by 0, so that differences from it stay minus infinity."""
    return x.masked_fill(x == -torch.inf, 0)


class Ring:
    """Ring attention of one grid (samples, heads, tokens) on one rank."""

    def __init__(self, partition: TokenPartition, group: Communicator) -> None:
        assert partition.num_ranks == group.size
        self.partition, self.group = partition, group
        self._held = partition.held
        self._mine = self._held[group.rank]

    def attend(
        self, core: Core, q_bHnD: Tensor, k_bHnD: Tensor, v_bHnD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention results (b, heads, n, D) for this rank's tokens, in the dtype of `v`.

        Samples that this rank holds whole are computed by `core`, as on one device.
        """
        q, k = q_bHnD.to(v_bHnD.dtype), k_bHnD.to(v_bHnD.dtype)
        if all(map(self._is_whole, self._mine)):
            for step in range(1, self.group.size):
                self._send(step, v_bHnD).wait()  # nothing; but all ranks do it together
            if mask is not None and mask.shape[0] > 1:
                mask = mask[self.partition.samples(self.group.rank)]
            return core(q, k, v_bHnD, mask)
        both = torch.cat([k, v_bHnD], dim=-1)
        done: dict[int, Partial] = {}
        coming: PendingReceive | None = None
        for step in range(self.group.size):
            came = coming.wait() if coming is not None else None
            if step + 1 < self.group.size:
                coming = self._send(step + 1, both)
            for held, places, keys in self._blocks(step, both, came):
                found = self._look(held, places, q, keys, mask)
                before = done.get(held.sample)
                done[held.sample] = found if before is None else merge(before, found)
        out = torch.empty_like(v_bHnD, memory_format=torch.contiguous_format)
        for held in self._mine:
            if self._is_whole(held):
                given = (x[held.row : held.row + 1, :, held.here] for x in (q, k, v_bHnD))
                answer = core(*given, _mask_of(mask, held, held.places))[0]
            else:
                answer = done[held.sample].out[0].to(out.dtype)
            out[held.row, :, held.here] = answer
        return out

    def _is_whole(self, held: LocalTokens) -> bool:
        return len(held.places) == self.partition.grid.places

    def _send(self, step: int, both_bHnE: Tensor) -> PendingReceive:
        """Start sending keys and values, concatenated, to the rank `step` places further."""
        rank, size = self.group.rank, self.group.size
        target = (rank + step) % size
        sizes = [[0] * size for _ in range(size)]
        for source in range(size):
            to = (source + step) % size
            sizes[source][to] = sum(len(each.places) for each in self._common(source, to))
        common = {each.sample for each in self._common(rank, target)}
        given = [
            both_bHnE[held.row, :, held.here].transpose(0, 1)
            for held in self._mine
            if held.sample in common
        ]
        heads, width = both_bHnE.shape[1], both_bHnE.shape[-1]
        rows = torch.cat(given) if given else both_bHnE.new_empty(0, heads, width)
        return self.group.start_all_to_all(rows, sizes, "keys and values go round")

    def _common(self, source: int, target: int) -> list[LocalTokens]:
        """Tokens of `source` in samples that `target` has tokens of, too."""
        wanted = {each.sample for each in self._held[target]}
        return [each for each in self._held[source] if each.sample in wanted]

    def _blocks(
        self, step: int, both_bHnE: Tensor, came: Tensor | None
    ) -> Iterator[tuple[LocalTokens, range, Tensor]]:
        """This rank's tokens, the places they attend to in this step, and those (1, H, l, 2 D)."""
        mine = {each.sample: each for each in self._mine}
        if came is None:
            for held in self._mine:
                if not self._is_whole(held):
                    yield held, held.places, both_bHnE[held.row : held.row + 1, :, held.here]
            return
        source, at = (self.group.rank - step) % self.group.size, 0
        for theirs in self._common(source, self.group.rank):
            stop = at + len(theirs.places)
            yield mine[theirs.sample], theirs.places, came[at:stop].transpose(0, 1)[None]
            at = stop

    def _look(
        self,
        held: LocalTokens,
        places: range,
        q_bHnD: Tensor,
        both_1HlE: Tensor,
        mask: Tensor | None,
    ) -> Partial:
        """Attention of one sample's local queries to the keys of some places."""
        q = q_bHnD[held.row : held.row + 1, :, held.here]
        k, v = both_1HlE.chunk(2, dim=-1)
        return partial_attention(q, k, v, _mask_of(mask, held, places))


def _mask_of(mask: Tensor | None, held: LocalTokens, places: range) -> Tensor | None:
    """The part of a mask (B, heads, N, N) for these queries and keys."""
    sample = range(held.sample, held.sample + 1)
    return part_of_mask(mask, {0: sample, 2: held.places, 3: places})
