"""Mean and variance of samples that lie in parts with several ranks.

Each rank takes those of its own part, in float32 at least, and sends them, a few numbers a group,
to the ranks that have another part of the same sample, and to nobody else. Merged they are in
float64 by Chan's formula, which subtracts no large sums from each other: with float64 tensors they
are what one device finds, but for rounding. Source: Chan, Golub and LeVeque 1983, "Algorithms for
computing the sample variance". Read next: `everyframe.ops.norm`, `team`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everyframe.ops.dtypes import upcast_to_float32
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.token_partition import cut

#: Bytes of one number as it is sent.
_BYTES = 8


class DistributedMoments:
    """Of samples `length` long, dealt out as one list: `spans` are the ranks' parts of it."""

    def __init__(self, spans: Sequence[range], length: int, team: Communicator) -> None:
        held = _held(spans, length)
        mine = held[team.rank]
        self._team = team
        #: How much this rank has of each of its samples, in order.
        self.parts = tuple(mine.values())
        self.is_whole = bool(mine) and all(part == length for part in self.parts)
        shared = [_shared(held, rank) for rank in range(team.size)]
        self._sizes = [[len(each) for each in row] for row in shared]
        samples = list(mine)
        self._sent = [samples.index(sample) for row in shared[team.rank] for sample in row]
        # Those of this rank first, then as they arrive: who has them, and of which sample.
        told = [(team.rank, sample) for sample in samples]
        told += [(rank, s) for rank, row in enumerate(shared) for s in row[team.rank]]
        # Added up in the order of the ranks, whoever does it.
        self._order = sorted(range(len(told)), key=lambda number: told[number][0])
        self._shares = torch.tensor(
            [
                [held[rank][of] / length if of == sample else 0.0 for rank, of in sorted(told)]
                for sample in samples
            ],
            dtype=torch.float64,
        ).view(len(samples), len(told), 1)

    def merged(self, x: Tensor, dim: int, groups: int) -> tuple[Tensor, Tensor] | None:
        """Mean and variance (samples, groups) in float64, of the samples that this rank has any of.

        `x` (1, C, ...) is what it has, one sample behind the other along `dim`. None if it has all
        of them whole: then it only stands by while others merge.
        """
        own = x.new_empty(0, 2, groups, dtype=torch.float64)
        if not self.is_whole and self.parts:
            parts = torch.split(x, list(self.parts), dim)
            own = torch.stack([_moments(part, groups) for part in parts])
        came = self._team.all_to_all(own[self._sent], self._sizes, "statistics are merged")
        if self.is_whole:
            return None
        means, variances = torch.cat([own, came])[self._order].unbind(1)
        shares = self._shares.to(means.device)
        mean = (shares * means).sum(1)
        apart = (means - mean[:, None]).square()
        return mean, (shares * (variances + apart)).sum(1)


def sent_bytes(spans: Sequence[range], length: int, rank: int, groups: int) -> int:
    """Bytes that leave that rank whenever the ranks of these spans merge."""
    return sum(map(len, _shared(_held(spans, length), rank))) * 2 * groups * _BYTES


def _held(spans: Sequence[range], length: int) -> list[dict[int, int]]:
    """How much of each of its samples each rank has."""
    return [{sample: stop - start for sample, start, stop in cut(s, length)} for s in spans]


def _shared(held: Sequence[dict[int, int]], rank: int) -> list[list[int]]:
    """For each rank, the samples of which that one and it have a part; for itself none."""
    mine = held[rank]
    return [
        [] if other == rank else [sample for sample in mine if sample in theirs]
        for other, theirs in enumerate(held)
    ]


def _moments(part: Tensor, groups: int) -> Tensor:
    """Mean and variance (2, groups) of a part (1, C, ...) of a sample, in float64.

    Channel by channel in two passes, which memory is laid out for, and then the channels merged.
    """
    wide, places = upcast_to_float32(part), list(range(2, part.ndim))
    means = wide.mean(places, keepdim=True)
    variances = (wide - means).square_().mean(places)
    means, variances = (each.double().view(groups, -1) for each in (means, variances))
    mean = means.mean(1)
    return torch.stack([mean, (variances + (means - mean[:, None]).square()).mean(1)])
