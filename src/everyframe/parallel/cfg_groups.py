"""Ranks in groups that each have some of the branches of guidance: which, and what they send.

A group has consecutive ranks, as many as make the slowest group soonest done. Any number of ranks
and branches. Numbers only, no tensors. Read next: `apart`, which exchanges what groups have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everyframe.parallel.uneven_split import group_ranks, uneven_ranges, uneven_sizes


@dataclass(frozen=True)
class CfgGroups:
    """The ranks of each group, and how many branches it has (`loads`)."""

    ranks: tuple[range, ...]
    loads: tuple[int, ...]

    @staticmethod
    def of(weights: Sequence[float], branches: int, groups: int) -> CfgGroups:
        """Ranks of these speeds in so many groups, or in fewer where there are fewer of them."""
        groups = min(groups, branches, len(weights))
        loads = uneven_sizes(branches, [1] * groups)
        return CfgGroups(group_ranks(len(weights), loads, weights), loads)

    @property
    def firsts(self) -> CfgGroups:
        """The same groups of one rank each, where the others have nothing to do."""
        return CfgGroups(tuple(range(n, n + 1) for n in range(len(self.ranks))), self.loads)

    def number_of(self, rank: int) -> int:
        """The number of that rank's group."""
        return next(number for number, group in enumerate(self.ranks) if rank in group)

    def branches(self, number: int) -> range:
        """Which branches that group has."""
        return uneven_ranges(sum(self.loads), self.loads)[number]

    def piece(self, lengths: Sequence[int], rank: int) -> range:
        """Which numbers of its group's part that rank sends, where parts are so long."""
        number = self.number_of(rank)
        group = self.ranks[number]
        return uneven_ranges(lengths[number], [1] * len(group))[rank - group.start]

    def sent(self, lengths: Sequence[int], rank: int) -> list[int]:
        """How many numbers that rank sends to each: nobody gets what it has."""
        group, piece = self.ranks[self.number_of(rank)], len(self.piece(lengths, rank))
        return [0 if other in group else piece for other in range(self.ranks[-1].stop)]
