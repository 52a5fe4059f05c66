"""CFG parallelism: groups of ranks that each compute some guidance branches, and what they send.

A group is a run of consecutive ranks, sized so that the slowest group finishes earliest. Any number
of ranks and branches works. Numbers only, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everyframe.parallel.uneven_split import group_ranks, uneven_ranges, uneven_sizes


@dataclass(frozen=True)
class CfgGroups:
    """Ranks of each group, and its number of branches (`loads`)."""

    ranks: tuple[range, ...]
    loads: tuple[int, ...]

    @staticmethod
    def of(weights: Sequence[float], branches: int, groups: int) -> CfgGroups:
        """Split ranks of these speeds into `groups`; fewer if there are fewer ranks or branches."""
        groups = min(groups, branches, len(weights))
        loads = uneven_sizes(branches, [1] * groups)
        return CfgGroups(group_ranks(len(weights), loads, weights), loads)

    @property
    def firsts(self) -> CfgGroups:
        """The same groups reduced to one rank each; the other ranks are idle."""
        return CfgGroups(tuple(range(n, n + 1) for n in range(len(self.ranks))), self.loads)

    def number_of(self, rank: int) -> int:
        """Group index of that rank."""
        return next(number for number, group in enumerate(self.ranks) if rank in group)

    def branches(self, number: int) -> range:
        """Indices of the branches of that group."""
        return uneven_ranges(sum(self.loads), self.loads)[number]

    def piece(self, lengths: Sequence[int], rank: int) -> range:
        """Slice of its group's result that a rank sends; `lengths` are the groups' result sizes."""
        number = self.number_of(rank)
        group = self.ranks[number]
        return uneven_ranges(lengths[number], [1] * len(group))[rank - group.start]

    def sent(self, lengths: Sequence[int], rank: int) -> list[int]:
        """Elements that the rank sends to each rank; none to its own group."""
        group, piece = self.ranks[self.number_of(rank)], len(self.piece(lengths, rank))
        return [0 if other in group else piece for other in range(self.ranks[-1].stop)]
