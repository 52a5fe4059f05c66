"""Mean and variance of samples that are split across ranks (distributed group norm).

Each rank computes the moments of its own shard, in float32 or wider, and sends them (a few numbers
per group) only to ranks with another shard of the same sample. They are merged in float64 with
Chan's formula, which subtracts no large sums. With float64 tensors the result equals that of
one device up to rounding. Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the
sample variance". The norm itself is in `everyframe.ops.norm`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everyframe.ops.dtypes import upcast_to_float32
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.token_partition import cut

#: Bytes of one number in transfer (float64).
_BYTES = 8


class DistributedMoments:
    """Moments of samples of `length`, concatenated and split; `spans` are the ranks' parts."""

    def __init__(self, spans: Sequence[range], length: int, group: Communicator) -> None:
        held = _lengths_by_rank(spans, length)
        mine = held[group.rank]
        self._group = group
        #: Length of this rank's part of each of its samples, in order.
        self.parts = tuple(mine.values())
        self.is_whole = bool(mine) and all(part == length for part in self.parts)
        shared = [_find_shared(held, rank) for rank in range(group.size)]
        self._sizes = [[len(each) for each in row] for row in shared]
        samples = list(mine)
        self._sent = [samples.index(sample) for row in shared[group.rank] for sample in row]
        # This rank's first, then as they arrive: by rank and sample.
        owners = [(group.rank, sample) for sample in samples]
        owners += [(rank, s) for rank, row in enumerate(shared) for s in row[group.rank]]
        # Added up in rank order on every rank.
        self._order = sorted(range(len(owners)), key=lambda number: owners[number][0])
        self._shares = torch.tensor(
            [
                [held[rank][of] / length if of == sample else 0.0 for rank, of in sorted(owners)]
                for sample in samples
            ],
            dtype=torch.float64,
        ).view(len(samples), len(owners), 1)

    def merge(self, x: Tensor, dim: int, groups: int) -> tuple[Tensor, Tensor] | None:
        """Mean and variance (samples, groups) in float64 of this rank's samples.

        `x` (1, C, ...) is the rank's part, its samples concatenated along `dim`. Returns None if
        all of its samples are whole: then it joins the exchange, but merges nothing.
        """
        own = x.new_empty(0, 2, groups, dtype=torch.float64)
        if not self.is_whole and self.parts:
            parts = torch.split(x, list(self.parts), dim)
            own = torch.stack([_moments(part, groups) for part in parts])
        came = self._group.all_to_all(own[self._sent], self._sizes, "statistics are merged")
        if self.is_whole:
            return None
        means, variances = torch.cat([own, came])[self._order].unbind(1)
        shares = self._shares.to(means.device)
        mean = (shares * means).sum(1)
        spread = (means - mean[:, None]).square()
        return mean, (shares * (variances + spread)).sum(1)


def sent_bytes(spans: Sequence[range], length: int, rank: int, groups: int) -> int:
    """Bytes that rank sends in each merge over these spans."""
    return sum(map(len, _find_shared(_lengths_by_rank(spans, length), rank))) * 2 * groups * _BYTES


def _lengths_by_rank(spans: Sequence[range], length: int) -> list[dict[int, int]]:
    """For each rank, the length of its part of each of its samples."""
    return [{sample: stop - start for sample, start, stop in cut(s, length)} for s in spans]


def _find_shared(held: Sequence[dict[int, int]], rank: int) -> list[list[int]]:
    """For each other rank, the samples that it and `rank` both have a part of."""
    mine = held[rank]
    return [
        [] if other == rank else [sample for sample in mine if sample in theirs]
        for other, theirs in enumerate(held)
    ]


def _moments(part: Tensor, groups: int) -> Tensor:
    """Mean and variance (2, groups) of a part (1, C, ...) of a sample, in float64.

    Channels are reduced in two passes, which suits their memory layout, and then merged.
    """
    wide, places = upcast_to_float32(part), list(range(2, part.ndim))
    means = wide.mean(places, keepdim=True)
    variances = (wide - means).square_().mean(places)
    means, variances = (each.double().view(groups, -1) for each in (means, variances))
    mean = means.mean(1)
    return torch.stack([mean, (variances + (means - mean[:, None]).square()).mean(1)])
