"""What a rank does of a pipeline's step: which branches of guidance, and which of their tokens.

Branches are dealt to groups of ranks first, where they are to be apart; the ranks of a group share
the tokens of theirs, if the denoiser's class can be cut. Else the first of them alone computes.
Numbers only. Read next: `cuts.py`, `branching.py`, `everyframe.parallel.groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from everyframe.families.family import Crew, RankPart
from everyframe.families.pipeline.cuts import ANSWER_BYTES
from everyframe.parallel.groups import Groups

if TYPE_CHECKING:
    from everyframe.families.pipeline.branching import Branches

#: The part of one of a crew's ranks of a call of so many samples.
Cutting = Callable[[Crew, int, int], RankPart]


def rank_part(
    branches: Branches, cutting: Cutting | None, crew: Crew, rank: int, title: str
) -> RankPart:
    """That rank's part of all branches of a step, and the bytes that leave it.

    Without `cutting` tokens can't be dealt out.
    """
    groups = Groups.of(crew.weights, branches.count, crew.groups)
    number = groups.number_of(rank)
    group, share = groups.ranks[number], groups.loads[number] / branches.count
    # Of a batch some of the samples; else some of the calls.
    batch, calls = branches.batch, branches.num_calls * share
    if branches.is_together:
        batch, calls = round(batch * share), branches.num_calls
    if cutting is not None:
        inside = Crew(crew.weights[group.start : group.stop], way=crew.way)
        part = cutting(inside, rank - group.start, batch)
    elif rank == group.start:
        part = RankPart(1.0, 1.0, 0)
        groups, rank = groups.firsts, number
    else:
        return RankPart(0.0, 0.0, 0, _idle(branches, len(groups.ranks), title), works=False)
    exchanged = sum(groups.sent(_lengths(branches, groups), rank))
    # Of calls, each group answers one before they are exchanged.
    times = branches.num_calls / (1 if branches.is_together else len(groups.ranks))
    return replace(
        part,
        tokens=part.tokens * share,
        attention=part.attention * share,
        sent_bytes=round(part.sent_bytes * calls + exchanged * times),
    )


def _lengths(branches: Branches, groups: Groups) -> list[int]:
    """Bytes of what each group answers before it is exchanged."""
    whole = sum(map(math.prod, branches.answer)) * ANSWER_BYTES
    if not branches.is_together:
        return [whole] * len(groups.loads)
    return [whole // branches.count * load for load in groups.loads]


def _idle(branches: Branches, num_groups: int, title: str) -> str:
    """Why a rank has nothing to do at all."""
    why = branches.why if branches.count == 1 else ""
    if branches.count > num_groups:
        why = f"cfg={branches.count} has its branches of guidance apart"
    where = "one device" if num_groups == 1 else f"{num_groups} devices, a branch each"
    return f"{title} makes each video on {where}" + (f": {why}" if why else "")
