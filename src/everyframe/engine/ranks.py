"""This process as one of several ranks of a run: its device, its videos and those it works with.

Ranks meet before there is a plan and tell each other their devices, so that each can plan for all;
then they compare their plans, so that what isn't the same is told at the start. How processes are
started and watched is `launch.py`'s affair; how tensors come from one to another,
`everyframe.parallel`'s. Read next: `gathering.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from everyframe import __version__
from everyframe.core.errors import CannotRunError, InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plain import from_plain, to_plain
from everyframe.core.plan import Plan
from everyframe.core.request import DTYPES, Request, random_seed
from everyframe.families.dealing import branch_groups
from everyframe.families.family import Model, Shared, Stage, Take
from everyframe.hardware.facts import machine_facts
from everyframe.hardware.lost import losses_told
from everyframe.parallel.meeting import again, check_alike, part, set_device
from everyframe.parallel.team import ONE, Team, Teams
from everyframe.planning.dividing import asked_devices
from everyframe.planning.resolve import default_threads
from everyframe.planning.sharing import are_alike, measured, speed_dtype


@dataclass(frozen=True)
class Join:
    """The way to the other ranks: ``meet(kind)`` joins them as `rank` and gives a team of all.

    `local` is set under torchrun, whose ranks may be on several machines: this one's number among
    those of this machine, and how many these are. There rank 0 alone is heard, so others send it
    what they made.
    """

    rank: int
    meet: Callable[[str], Team]
    local: tuple[int, int] | None = None


@dataclass(frozen=True)
class Met:
    """All ranks before there is a plan: their devices, the threads of each, and a common seed."""

    rank: int
    world: Team
    devices: tuple[DeviceFacts, ...]
    num_threads: int
    seed: int
    gathers: bool = False


def met(request: Request, join: Join | None, num_threads: int | None = None) -> Met | None:
    """Meet the other ranks, if there are any; each tells its device.

    Raises:
        InputError: this machine lacks what was asked for, or another rank is of another version.
    """
    if join is None:
        return None
    facts = machine_facts(request.device)
    place, count = (join.rank, request.num_ranks) if join.local is None else join.local
    here = request
    if join.local is not None:  # what was asked counts the ranks of all machines
        number = None if request.devices is not None else count
        here = Request(**{**request.given(), "num_devices": number})
    mine = asked_devices(here, facts)[place]
    threads = num_threads or default_threads(facts, count)
    set_device(mine.torch_name)
    world = join.meet(mine.kind)
    versions = {"everyframe": __version__, "torch": torch.__version__, "device": mine.kind}
    check_alike(world, versions, "software and kind of device")
    threads = min(world.tell_all(threads, "ranks tell their threads"))
    devices = _told_devices(world, mine)
    if not are_alike(devices):
        dtype = speed_dtype(DTYPES[request.dtype])
        devices = _told_devices(world, measured(mine, dtype, threads))
    seed = world.tell(random_seed() if request.seed is None else request.seed, 0, "the seed")
    return Met(join.rank, world, devices, threads, seed, join.local is not None)


def _told_devices(world: Team, mine: DeviceFacts) -> tuple[DeviceFacts, ...]:
    """The devices of all ranks."""
    told = world.tell_all(to_plain(mine), "ranks tell their devices")
    return tuple(from_plain(each) for each in told)


@dataclass(frozen=True)
class Here:
    """What this process does: `plan` is on its own device, `takes` are its videos (None: all).

    `group` is the number of those ranks that make the same videos. `sources` are the first ranks of
    the other groups, where rank 0 gathers what they make.
    """

    plan: Plan
    teams: Teams = ONE
    takes: Sequence[int] | None = None
    group: int = 0
    sources: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that make these videos."""
        return self.teams.team.is_lead

    def mine(self, takes: Sequence[Take]) -> list[Take]:
        """Those of all videos that are made here."""
        wanted = None if self.takes is None else {self.plan.settings.seed + n for n in self.takes}
        return [take for take in takes if wanted is None or take.seed in wanted]

    def stages(self, model: Model, clip: int) -> Sequence[Stage]:
        """The stages of one clip, as they are done here."""
        if self.teams is ONE or not isinstance(model, Shared):
            return model.stages(self.plan, clip)
        return model.shared_stages(self.plan, clip, self.teams)


@losses_told("a device", "while ranks met")
def joined(
    plan: Plan,
    model: Model,
    record: dict[str, Any],
    peers: Met | None,
    skip: Collection[int] = (),
) -> Here:
    """This process's part among `peers`; videos of the seeds in `skip` are made already.

    All go by the plan of the first: what was tried there and then is the same for all.

    Raises:
        CannotRunError: the plan has several ranks, and there is no way to the others.
        InputError: the others have another plan.
    """
    division = plan.division
    if division is None:
        return Here(plan)
    if peers is None:
        raise CannotRunError(
            f"this plan has {len(division.ranks)} ranks, which are processes of their own, and "
            "this process is to do it alone; unset EVERYFRAME_IN_PROCESS, or give one device"
        )
    world = peers.world
    check_alike(world, _facts(plan, record), "plan")
    told = world.tell(to_plain(plan), 0, "the plan is handed on")
    plan, mine = from_plain(told), division.ranks[peers.rank]
    world.weights = division.weights
    working = [team for team in division.teams if team]
    resting = [rank for rank, each in enumerate(division.ranks) if not each.works]
    rest = [resting] if resting else []
    team = part(world, [*working, *rest])
    inside = None
    apart = [(ranks, branch_groups(model, plan.settings, division, ranks)) for ranks in working]
    parts = [[ranks[at] for at in own] for ranks, groups in apart if groups for own in groups.ranks]
    if parts:
        inside = again(world, [*parts, *rest])
    holds = any(each.holders > 1 for each in plan.components)
    room = [each.room for each in division.ranks]
    supply = again(world, division.groups, room) if holds else None
    first = plan.settings.seed
    left = [
        [number for number in division.takes(group) if first + number not in skip]
        for group in range(len(division.videos))
    ]
    # Those who have nothing to make are not waited for.
    at_work = [rank for rank, each in enumerate(division.ranks) if left[each.group] and each.works]
    idle = [rank for rank in range(world.size) if rank not in at_work]
    if peers.gathers and 0 in idle and at_work:
        raise InputError("rank 0 writes the videos and makes none; give it a share above 0")
    if idle and at_work:
        world = part(world, [at_work, idle])
    takes = left[mine.group] if mine.works else []
    teams = Teams(world, team, division.cfg, division.way, supply, inside)
    leads = [at_work.index(group[0]) for group in division.groups if group[0] in at_work]
    sources = tuple(rank for rank in leads if rank) if peers.gathers else ()
    return Here(_on(plan, mine.device), teams, takes, mine.group, sources)


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


def _plain(value: Any) -> Any:
    """As it would come out of JSON, which has no tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
