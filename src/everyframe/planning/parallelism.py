"""Choose the devices of a run and how it is divided among them.

Several videos are distributed whole. Within one video, the family's rules divide the tokens, which
may be unequal and need no divisibility; CFG branches are divided by those rules or by ``cfg``. The
choice depends only on counts and nominal speeds, so ``plan`` and ``generate`` agree.
`everyframe.core.parallel_plan` defines the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.parallel_plan import ParallelConfig, ParallelPlan, RankPlan, parse_parallel
from everyframe.core.plan import Settings
from everyframe.core.request import DTYPES, Request
from everyframe.hardware.facts import device_names, pick_device
from everyframe.hardware.throughput import with_fp16_tried
from everyframe.parallel.uneven_split import group_ranks, uneven_sizes
from everyframe.planning.division_checks import backends_of, check_division, shares_asked
from everyframe.runtime.interface import ModelSpec, ShardableSpec, VideoGroup

#: Free memory is rounded to this many steps of the largest.
_ROOM = 16
#: Nominal operations, and bytes to another device, per second of one device (of a CPU: one core).
#: Only their ratio matters, for the choice between divisions.
_OPERATIONS = {"cpu": 5e10, "cuda": 5e13}
_BYTES = {"cpu": 1e9, "cuda": 1e10}
#: Slowdown of attention in a ring, from `benchmarks/ring.py`: one rank's queries take a kernel call
#: for each rank's keys, and the results are merged.
_RING = {"cpu": 1.1, "cuda": 1.2}

#: Fast paths that don't work with several devices, and why.
AVOIDED = {"compile": "blocks of several devices exchange tensors in their middle"}


@dataclass(frozen=True)
class StepCost:
    """Cost of one step of one video.

    Attributes:
        operations: of all CFG branches.
        element_bytes: bytes per number sent.
        attention: operations of attention, part of `operations`.
    """

    operations: float
    element_bytes: int
    attention: float = 0.0


def asked_devices(request: Request, facts: MachineFacts) -> tuple[DeviceFacts, ...]:
    """The devices of a request; one unless it asks for several.

    Raises:
        InputError: not that many exist, or they can't work together.
    """
    if request.devices is not None:
        names = device_names(request.devices)
        if request.num_devices not in (None, len(names)):
            raise InputError(
                f"devices names {len(names)} and num_devices is {request.num_devices}; give one"
            )
        found = tuple(pick_device(facts, name) for name in names)
        if len({device.torch_name for device in found}) < len(found) and found[0].kind != "cpu":
            raise InputError(f"devices names a device twice: {request.devices!r}")
        if len({device.kind for device in found}) > 1:
            raise InputError(
                f"devices must be of one kind to work together, got {request.devices!r}; "
                "give CUDA devices, or cpu several times"
            )
    else:
        first = pick_device(facts, request.device)
        count = request.num_devices or 1
        alike = [device for device in facts.devices if device.kind == first.kind]
        if first.kind == "cpu":
            found = (first,) * count
        elif count == 1:
            found = (first,)
        elif len(alike) < count:
            raise InputError(
                f"num_devices is {count} and this machine has {len(alike)} of {first.kind}; give "
                f"at most {len(alike)}, or --device cpu for ranks on the CPU"
            )
        else:
            found = tuple(alike[:count])
    if len(found) > 1 and found[0].kind not in _OPERATIONS:
        raise InputError(f"there is one {found[0].kind} device; several can be cuda or cpu")
    return tuple(map(with_fp16_tried, found)) if DTYPES[request.dtype] == "float16" else found


def make_parallel_plan(
    request: Request,
    model: ModelSpec,
    settings: Settings,
    devices: Sequence[DeviceFacts],
    effort_of: Callable[[Settings], StepCost],
    num_threads: int,
    weights: Sequence[float] | None = None,
    *,
    shards: bool = False,
    together: bool = False,
) -> ParallelPlan | None:
    """Divide the run among devices; None for one device. `effort_of` is called only for several.

    Args:
        weights: speeds of the devices if the request names no shares; None means equal.
        shards: several devices for every video.
        together: keep CFG branches together unless requested otherwise.

    Raises:
        InputError: the requested division is impossible; says what would work.
    """
    check_division(request, model, settings, len(devices))
    asked = parse_parallel(request.parallel)
    weights = tuple(shares_asked(request, len(devices)) or weights or (1.0,) * len(devices))
    if len(devices) == 1:
        return None
    effort = effort_of(settings)
    most = min(sum(map(bool, weights)), settings.num_videos)
    # A named sequence degree uses all devices that other named degrees leave (checked before).
    counts = [asked.data or 1] if asked.data or asked.sequence else list(range(most, 0, -1))
    divisions = [
        replace(
            _division(model, settings, devices, VideoGroup(weights, cfg, backend), count, effort),
            num_threads=num_threads,
        )
        for count in counts
        for cfg in _branchings(asked, model, settings, together=together)
        if cfg * count <= len(devices)
        for backend in ([asked.backend] if asked.backend else backends_of(model) or ("",))
    ]
    if shards:
        divisions = [each for each in divisions if min(map(len, each.groups)) > 1]
    kind = devices[0].kind
    speed = _OPERATIONS[kind] * (num_threads if kind == "cpu" else 1)
    pace = _Pace(speed, _BYTES[kind], _RING[kind])
    # At equal time, several videos at once come first: they exchange nothing.
    return min(divisions, key=lambda each: _seconds(each, effort, pace))


def _branchings(
    asked: ParallelConfig, model: ModelSpec, settings: Settings, *, together: bool
) -> tuple[int, ...]:
    if asked.cfg is not None or asked.sequence is not None or together:
        return (asked.cfg or 1,)
    if not isinstance(model, ShardableSpec) or not model.has_independent_branches:
        return (1,)
    if settings.method is not None and model.sequence_backends:
        return (1,)  # a lossy method needs whole answers: apart, all steps would be exact
    return tuple(range(1, model.num_branches(settings) + 1))


def sending_seconds(division: ParallelPlan | None, link: float | None) -> float:
    """Seconds per step to exchange tokens over a link of that speed; nominal without one."""
    if division is None:
        return 0.0
    return max(rank.sent_bytes for rank in division.ranks) / (link or _nominal_link(division))


def _nominal_link(division: ParallelPlan) -> float:
    return _BYTES[division.ranks[0].device.partition(":")[0]]


def weights_seconds(division: ParallelPlan | None, link: float | None) -> float:
    """Seconds per step to send sharded weights; `link` as in `sending_seconds`."""
    if division is None:
        return 0.0
    groups = [[division.ranks[rank].weight_bytes for rank in group] for group in division.groups]
    # Each rank sends its shard to all others of its group.
    most = max(sum(sent) / max(1, len(sent) - 1) for sent in groups)
    return most / (link or _nominal_link(division))


def can_share(request: Request, model: ModelSpec, division: ParallelPlan | None) -> bool:
    """Whether devices with videos of their own could instead share each video."""
    is_alone = division is not None and min(map(len, division.groups)) == 1
    is_collective = isinstance(model, ShardableSpec) and model.is_collective
    return is_alone and is_collective and parse_parallel(request.parallel).data in (None, 1)


def _division(
    model: ModelSpec,
    settings: Settings,
    devices: Sequence[DeviceFacts],
    video_group: VideoGroup,
    data: int,
    effort: StepCost,
) -> ParallelPlan:
    """Divide all devices, of the speeds of `video_group`, into `data` video groups."""
    weights = video_group.weights
    parted = group_ranks(len(devices), [1.0] * data, weights)
    rooms = rooms_of(devices)
    speeds = [sum(weights[rank] for rank in group) for group in parted]
    ranks: list[RankPlan] = []
    for number, group in enumerate(parted):
        mine = replace(video_group, weights=tuple(weights[rank] for rank in group))
        for place, rank in enumerate(group):
            name = devices[rank].torch_name
            plan = RankPlan(name, number, weights[rank], memory_share=rooms[rank])
            ranks.append(_part(plan, model, settings, mine, place, effort))
    return ParallelPlan(
        tuple(ranks),
        uneven_sizes(settings.num_videos, speeds),
        video_group.num_cfg_groups,
        backend=video_group.backend,
    )


def rooms_of(devices: Sequence[DeviceFacts]) -> tuple[float, ...]:
    """Relative capacity of each device for sharded weights.

    By free memory in steps, so that small changes have no effect.
    """
    most = max(device.free_memory for device in devices)
    steps = [max(1, round(_ROOM * device.free_memory / max(1, most))) for device in devices]
    return tuple(step / _ROOM for step in steps)


def _part(
    plan: RankPlan,
    model: ModelSpec,
    settings: Settings,
    video_group: VideoGroup,
    place: int,
    effort: StepCost,
) -> RankPlan:
    """That rank's share of one video's denoising, as rank `place` of its video group."""
    if isinstance(model, ShardableSpec):
        part = model.rank_part(settings, video_group, place, effort.element_bytes)
        return replace(
            plan,
            token_share=part.tokens,
            attention_share=part.attention,
            sent_bytes=part.sent_bytes,
            idle_reason=part.idle,
            is_active=part.works,
        )
    if place == 0:
        return plan
    idle = f"{model.title} makes each video on one device"
    return replace(plan, token_share=0.0, attention_share=0.0, idle_reason=idle, is_active=False)


@dataclass(frozen=True)
class _Pace:
    """Operations and link bytes per second, and the slowdown of attention in a ring."""

    operations: float
    sent: float
    ring: float


def _seconds(division: ParallelPlan, effort: StepCost, pace: _Pace) -> float:
    """Seconds of a step of all videos, at nominal speeds of devices and links."""
    slowest = 0.0
    heaviest = max(division.speeds)
    for group, ranks in enumerate(division.groups):
        steps = [
            _rank_seconds(rank, division.backend, effort, rank.speed / heaviest, pace)
            for rank in (division.ranks[number] for number in ranks)
            if rank.speed
        ]
        slowest = max(slowest, max(steps) * division.videos_per_group[group])
    return slowest


def _rank_seconds(rank: RankPlan, backend: str, cost: StepCost, speed: float, pace: _Pace) -> float:
    """Seconds of a rank's step; `speed` is relative to the fastest rank."""
    share = max(rank.token_share, rank.attention_share)
    second = pace.operations * speed
    computing = share * cost.operations / second
    sending = rank.sent_bytes / pace.sent
    if backend != "ring":
        return computing + sending
    # Sending keys overlaps with computing on others.
    looking = share * cost.attention / second
    return computing - looking + max(looking * pace.ring, sending)
