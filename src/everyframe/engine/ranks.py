"""This process as one of several ranks of a run: its device, its videos and those it works with.

Every rank plans for itself and then compares its plan with the others', so that what isn't the same
is told at the start. How processes are started and watched is `launch.py`'s affair; how tensors
come from one to another, `everyframe.parallel`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from everyframe.core.errors import CannotRunError
from everyframe.core.plain import from_plain, to_plain
from everyframe.core.plan import Plan
from everyframe.families.family import Model, Shared, Stage, Take
from everyframe.parallel.meeting import check_alike, part, set_device
from everyframe.parallel.team import ONE, Team, Teams


@dataclass(frozen=True)
class Join:
    """The way to the other ranks: ``meet(plan)`` joins them as `rank` and gives a team of all."""

    rank: int
    meet: Callable[[Plan], Team]


@dataclass(frozen=True)
class Here:
    """What this process does: `plan` is on its own device, `takes` are its videos (None: all)."""

    plan: Plan
    teams: Teams = ONE
    takes: range | None = None

    def mine(self, takes: Sequence[Take]) -> list[Take]:
        """Those of all videos that are made here."""
        return list(takes) if self.takes is None else [takes[number] for number in self.takes]

    def stages(self, model: Model, clip: int) -> Sequence[Stage]:
        """The stages of one clip, as they are done here."""
        if self.teams is ONE or not isinstance(model, Shared):
            return model.stages(self.plan, clip)
        return model.shared_stages(self.plan, clip, self.teams)


def joined(plan: Plan, model: Model, record: dict[str, Any], join: Join | None) -> Here:
    """This process's part; the others are met by `join` if there are any.

    All go by the plan of the first: what was tried there and then is the same for all.

    Raises:
        CannotRunError: the plan has several ranks, and there is no way to the others.
        InputError: the others have another plan.
    """
    division = plan.division
    if division is None:
        return Here(plan)
    if join is None:
        raise CannotRunError(
            f"this plan has {len(division.ranks)} ranks, which are processes of their own, and "
            "this process is to do it alone; unset EVERYFRAME_IN_PROCESS, or give one device"
        )
    set_device(division.ranks[join.rank].device)
    world = join.meet(plan)
    check_alike(world, _facts(plan, record), "plan")
    told = world.tell(to_plain(plan, _nothing_bulky), 0, "the plan is handed on")
    plan, mine = from_plain(told, _nothing_bulky), division.ranks[join.rank]
    team = part(world, division.groups)
    # Those who have nothing to make are not waited for.
    at_work = [rank for rank, each in enumerate(division.ranks) if division.videos[each.group]]
    idle = [rank for rank in range(world.size) if rank not in at_work]
    if idle:
        world = part(world, [at_work, idle])
    takes = division.takes(mine.group)
    if not team.is_lead and not isinstance(model, Shared):
        takes = range(0)
    return Here(_on(plan, mine.device), Teams(world, team, division.cfg, division.way), takes)


def _on(plan: Plan, device: str) -> Plan:
    """The plan on another device of the same kind.

    Only the number of the device changes: what follows from its other facts, such as the precision
    in which a repair is made, must be the same on all ranks.
    """
    index = torch.device(device).index
    components = tuple(replace(part, device=device) for part in plan.components)
    return replace(plan, device=replace(plan.device, index=index), components=components)


def _facts(plan: Plan, record: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks, as plain data."""
    facts = {f"version of {name}": text for name, text in record["versions"].items()}
    facts["version of everyframe"] = record["everyframe"]
    facts["weights"] = record["model"].get("sha256")
    facts |= {f"setting {name}": value for name, value in asdict(plan.settings).items()}
    facts["division"] = asdict(plan.division) if plan.division is not None else None
    return {name: _plain(value) for name, value in facts.items()}


def _nothing_bulky(value: Any) -> None:
    return None


def _plain(value: Any) -> Any:
    """As it would come out of JSON, which has no tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
