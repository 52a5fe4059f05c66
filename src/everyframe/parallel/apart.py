"""Groups of ranks that compute different parts of one answer, and how each group gets the others'.

The ranks of a group have their part alike, once they have put it together. So each of them sends a
piece of it, to those of the other groups alone: nobody gets what it has, and what leaves a group
leaves all of its ranks. What the parts are, and when they are exchanged, is others' affair:
`everyframe.families.pipeline.rounds`. Read next: `groups`, `team`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.parallel.groups import Groups
from everyframe.parallel.team import Team


@dataclass(frozen=True)
class Apart:
    """The ranks of `team` in `groups`, each of which has a part of its own."""

    team: Team
    groups: Groups

    @property
    def mine(self) -> int:
        """The number of this rank's group."""
        return self.groups.number_of(self.team.rank)

    def exchange(self, part: Tensor, lengths: Sequence[int], what: str) -> list[Tensor]:
        """What each group has, on every rank; `part` (n,) is that of this rank's group.

        All know how long each is, in `lengths`; one may have nothing.
        """
        mine, team = self.mine, self.team
        sizes = [self.groups.sent(lengths, rank) for rank in range(team.size)]
        piece = self.groups.piece(lengths, team.rank)
        given = part[piece.start : piece.stop].repeat(team.size - len(self.groups.ranks[mine]))
        came = team.all_to_all(given, sizes, what)
        theirs = iter(torch.split(came, [n for g, n in enumerate(lengths) if g != mine]))
        return [part if number == mine else next(theirs) for number in range(len(lengths))]
