"""What ranks hand each other that have a batch of frames each, round by round.

Which frames a batch has is the plan's affair, never that of the number of ranks, and each is
computed whole by one of them: what comes out is bit for bit what one device would give. After each
round all have the latents of it, so what is kept of a run in the middle of a round is what one
device would have kept: the batches before, and the first one of the round as far as it is.

Not here: who has which batch (`everyframe.families.dealing`), and what is computed of it
(`stages.py`, `pictures.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from everyframe.core.events import Event, event_of
from everyframe.families.guarding import Guard
from everyframe.parallel.team import Team
from everyframe.samplers.step import Step

_HANDED = "batches of frames are handed on"


def share(team: Team, mine: Sequence[Tensor] | None, rank: int) -> list[Tensor]:
    """What that rank made of a batch, on every rank; `mine` on itself."""
    return team.share(mine, rank, _HANDED)


def hear(team: Team, guard: Guard, events: Iterable[Event]) -> None:
    """Have the first rank's guard tell what happened on the others as well."""
    if team.size == 1:
        return
    told = team.tell_all([] if team.is_lead else [each.to_json() for each in events], _HANDED)
    if team.is_lead:
        guard.hear(event_of(each) for one in told for each in one)


def in_round(
    team: Team,
    guard: Guard,
    steps: Iterator[Step],
    ranks: Sequence[int],
    num_steps: int,
) -> Iterator[Step]:
    """The steps of this rank's batch; the state after the last one is that of the whole round.

    `ranks` have a batch in it, in their order. One that has none (its `steps` are none) makes a
    step of what the others made.
    """
    if team.size == 1:
        yield from steps
        return
    events: list[Event] = []
    last: Step | None = None
    for step in steps:
        events += () if team.is_lead else guard.events()
        if step.index + 1 == num_steps:
            last = step
        else:
            yield step
    made = [share(team, [last.x] if last and rank == team.rank else None, rank) for rank in ranks]
    hear(team, guard, events)
    whole = torch.cat([one[0] for one in made])
    yield Step(num_steps - 1, num_steps, last.t if last else torch.zeros(1), whole)
