"""Set up this process as one rank of a distributed run: its device, its videos, its video group.

Ranks exchange device facts before planning, so that each can plan for all. Afterwards they compare
their plans, and a mismatch is an error at the start of the run. `launcher.py` starts and watches
the processes; `everyframe.parallel` moves tensors between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from everyframe._version import __version__
from everyframe.core.errors import CannotRunError, InputError
from everyframe.core.events import (
    AudioDecoded,
    Event,
    Events,
    FramesDecoded,
    Note,
    Preview,
    Repaired,
    VideoDone,
    event_of,
)
from everyframe.core.facts import DeviceFacts
from everyframe.core.limits import random_seed
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import Plan
from everyframe.core.request import DTYPES, Request
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.families.registry import stages_of
from everyframe.hardware.device_loss import translate_device_loss
from everyframe.hardware.facts import Freed, machine_facts
from everyframe.media.pixels import to_uint8
from everyframe.parallel.communicator import ONE, Communicator, ParallelContext
from everyframe.parallel.pending import PendingSend
from everyframe.parallel.rendezvous import check_equal_on_ranks, new_group, set_device, split
from everyframe.planning.load_balancing import are_alike, speed_dtype, with_rate
from everyframe.planning.parallelism import asked_devices
from everyframe.planning.resolve import default_threads
from everyframe.runtime.interface import ModelSpec, ShardableSpec, Stage, VideoState
from everyframe.runtime.rank_shares import branch_groups


@dataclass(frozen=True)
class Rendezvous:
    """How this process joins the other ranks of a run.

    Attributes:
        rank: number of this rank among all ranks.
        meet: ``meet(kind)`` joins the ranks and returns a communicator of all of them.
        local: set under torchrun, where ranks may be on several machines: (rank on this machine,
            ranks on this machine). There only rank 0 outputs results, so the others send theirs to
            it.
    """

    rank: int
    meet: Callable[[str], Communicator]
    local: tuple[int, int] | None = None


@dataclass(frozen=True)
class Peers:
    """All ranks before planning: their devices, the threads of each, and a common seed."""

    rank: int
    world: Communicator
    devices: tuple[DeviceFacts, ...]
    num_threads: int
    seed: int
    gathers: bool = False


def meet_peers(
    request: Request,
    join: Rendezvous | None,
    num_threads: int | None = None,
    freed: Freed | None = None,
) -> Peers | None:
    """Join the other ranks, if any, and exchange device facts; `freed` as in `prepare`.

    Raises:
        InputError: this machine lacks what was asked for, or another rank runs another version.
    """
    if join is None:
        return None
    facts = machine_facts(request.device, freed)
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
    check_equal_on_ranks(world, versions, "software and kind of device")
    threads = min(world.all_gather_object(threads, "ranks gather their threads"))
    devices = _gather_devices(world, mine)
    if not are_alike(devices):
        dtype = speed_dtype(DTYPES[request.dtype])
        devices = _gather_devices(world, with_rate(mine, dtype, threads))
    seed = world.broadcast_object(
        random_seed() if request.seed is None else request.seed, 0, "the seed"
    )
    return Peers(join.rank, world, devices, threads, seed, join.local is not None)


def _gather_devices(world: Communicator, mine: DeviceFacts) -> tuple[DeviceFacts, ...]:
    data = world.all_gather_object(to_jsonable(mine), "ranks gather their devices")
    return tuple(from_jsonable(each) for each in data)


@dataclass(frozen=True)
class RankContext:
    """What this rank executes.

    Attributes:
        plan: the plan with this rank's own device.
        parallel: communicators of this rank.
        videos: the videos of this rank; None means all.
        group: index of the video group, the ranks that compute the same videos.
        sources: first ranks of the other groups; rank 0 gathers their results.
    """

    plan: Plan
    parallel: ParallelContext = ONE
    videos: Sequence[int] | None = None
    group: int = 0
    sources: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its video group."""
        return self.parallel.video_group.is_lead

    def mine(self, videos: Sequence[VideoState]) -> list[VideoState]:
        wanted = None if self.videos is None else {self.plan.settings.seed + n for n in self.videos}
        return [video for video in videos if wanted is None or video.seed in wanted]

    def stages(self, model: ModelSpec, clip: int) -> Sequence[Stage]:
        parallel = self.parallel if isinstance(model, ShardableSpec) else ONE
        return stages_of(model, self.plan, clip, parallel)


@translate_device_loss("a device", "while ranks met")
def join_plan(
    plan: Plan,
    model: ModelSpec,
    record: dict[str, Any],
    peers: Peers | None,
    skip: Collection[int] = (),
) -> RankContext:
    """Find this process's share of the plan among `peers`; videos of seeds in `skip` are done.

    All ranks use the fast paths and repairs of rank 0's plan.

    Raises:
        CannotRunError: the plan has several ranks and this process can't reach the others.
        InputError: another rank has a different plan.
    """
    division = plan.parallel
    if division is None:
        return RankContext(plan)
    if peers is None:
        raise CannotRunError(
            f"this plan has {len(division.ranks)} ranks, which are processes of their own, and "
            "this process is to do it alone; unset EVERYFRAME_IN_PROCESS, or give one device"
        )
    world, mine = peers.world, division.ranks[peers.rank]
    # Each rank finds them by a dry run of its own.
    branches = _ranks_of_branches(plan, division, model)
    facts = {**_shared_facts(plan, record), "ranks of guidance branches": branches}
    check_equal_on_ranks(world, facts, "plan")
    plan = from_jsonable(world.broadcast_object(to_jsonable(plan), 0, "the plan is broadcast"))
    world.weights = division.speeds
    video_group, branch_group, weights_group = _make_groups(world, plan, division, branches)
    videos = _videos_of_groups(plan, division, skip)
    # Ranks without videos are not waited for.
    working = [
        rank for rank, each in enumerate(division.ranks) if videos[each.group] and each.is_active
    ]
    idle = [rank for rank in range(world.size) if rank not in working]
    if peers.gathers and 0 in idle and working:
        raise InputError("rank 0 writes the videos and makes none; give it a share above 0")
    if idle and working:
        world = split(world, [working, idle])
    parallel = ParallelContext(
        world, video_group, division.cfg_degree, division.backend, weights_group, branch_group
    )
    leads = [working.index(group[0]) for group in division.groups if group[0] in working]
    sources = tuple(rank for rank in leads if rank) if peers.gathers else ()
    own_videos = videos[mine.group] if mine.is_active else []
    return RankContext(_on_device(plan, mine.device), parallel, own_videos, mine.group, sources)


def _ranks_of_branches(plan: Plan, division: ParallelPlan, model: ModelSpec) -> list[list[int]]:
    """The ranks of each group that has guidance branches of its own; empty if no ranks have."""
    return [
        [ranks[at] for at in own]
        for ranks in division.active_groups
        if ranks and (groups := branch_groups(model, plan.settings, division, ranks))
        for own in groups.ranks
    ]


def _make_groups(
    world: Communicator, plan: Plan, division: ParallelPlan, branches: list[list[int]]
) -> tuple[Communicator, Communicator | None, Communicator | None]:
    """This rank's video group, and its groups for CFG branches and sharded weights, if any."""
    working = [ranks for ranks in division.active_groups if ranks]
    resting = [rank for rank, each in enumerate(division.ranks) if not each.is_active]
    rest = [resting] if resting else []
    video_group = split(world, [*working, *rest])
    branch_group = new_group(world, [*branches, *rest]) if branches else None
    has_shards = any(each.num_weight_shards > 1 for each in plan.components)
    room = [each.memory_share for each in division.ranks]
    weights_group = new_group(world, division.groups, room) if has_shards else None
    return video_group, branch_group, weights_group


def _videos_of_groups(plan: Plan, division: ParallelPlan, skip: Collection[int]) -> list[list[int]]:
    """Numbers of the videos that each video group still has to make."""
    first = plan.settings.seed
    return [
        [number for number in division.videos_of(group) if first + number not in skip]
        for group in range(len(division.videos_per_group))
    ]


def _on_device(plan: Plan, device: str) -> Plan:
    """The same plan on another device of the same kind.

    Only the device index changes. Everything derived from device facts, such as the precision of a
    repair, must be the same on all ranks.
    """
    index = torch.device(device).index
    components = tuple(replace(each, device=device) for each in plan.components)
    return replace(plan, device=replace(plan.device, index=index), components=components)


def _shared_facts(plan: Plan, record: dict[str, Any]) -> dict[str, Any]:
    """The parts of a plan that must be equal on all ranks, as plain data."""
    facts = {f"version of {name}": text for name, text in record["versions"].items()}
    facts["version of everyframe"] = record["everyframe"]
    facts["weights"] = record["model"].get("sha256")
    facts |= {f"setting {name}": value for name, value in asdict(plan.settings).items()}
    facts["parallel"] = asdict(plan.parallel) if plan.parallel is not None else None
    plain: dict[str, Any] = json.loads(json.dumps(facts))  # as other ranks receive it
    return plain


_WHAT = "videos are handed over"

#: Events of other video groups that rank 0 yields after its own.
_HANDED_OVER = (FramesDecoded, AudioDecoded, VideoDone, Note, Repaired, Preview)


def gather_events(events: Iterator[Event], here: RankContext) -> Events:
    """On rank 0, yield the events of all video groups in turn; elsewhere this rank's own."""
    world = here.parallel.world
    if world.is_lead:
        yield from events
        for source in here.sources:
            while (event := _receive(world, source)) is not None:
                yield event
    elif world.rank in here.sources:
        # Awaited at the end only: rank 0 has its own work.
        sent: list[PendingSend] = []
        for event in events:
            if isinstance(event, _HANDED_OVER):
                sent.append(_sent(world, event))
            yield event
        sent.append(world.send([], None, 0, _WHAT))
        for each in sent:
            each.wait()
    else:
        yield from events


def _sent(world: Communicator, event: Event) -> PendingSend:
    """Send an event to rank 0, with frames as the bytes that are written."""
    if isinstance(event, FramesDecoded):
        frames = torch.from_numpy(np.ascontiguousarray(to_uint8(event.frames)))
        return world.send([frames], event.to_json(), 0, _WHAT)
    if isinstance(event, AudioDecoded):
        samples = torch.from_numpy(np.ascontiguousarray(event.samples))
        return world.send([samples], event.to_json(), 0, _WHAT)
    if isinstance(event, Preview):
        image = torch.frombuffer(bytearray(event.image), dtype=torch.uint8)
        return world.send([image], event.to_json(), 0, _WHAT)
    return world.send([], event.to_json(), 0, _WHAT)


def _receive(world: Communicator, source: int) -> Event | None:
    """Receive the next event of that rank; None after its last."""
    tensors, data = world.receive(source, _WHAT)
    if data is None:
        return None
    kind, own = data["type"], {name: value for name, value in data.items() if name != "type"}
    if kind == FramesDecoded.type:
        return FramesDecoded(**own, frames=tensors[0].numpy())
    if kind == AudioDecoded.type:
        return AudioDecoded(**own, samples=tensors[0].numpy())
    if kind == Preview.type:
        return Preview(**own, image=tensors[0].numpy().tobytes())
    if kind == VideoDone.type:
        return VideoDone(**own)
    return event_of(data)
