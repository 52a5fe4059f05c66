"""Which devices a run has, and how it is divided among them.

Videos are dealt out whole where there are several. Within one video, tokens are dealt out by places
and by frames, uneven and without a rule of divisibility; branches of guidance come apart by that,
or by ``cfg``. The choice depends on counts and nominal speeds alone, so that ``plan`` and
``generate`` choose alike. Read next: `everyframe.core.division`, `everyframe.parallel.grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everyframe.core.division import Division, RankPlan, Ways, parse_shares, parse_ways
from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.family import Model, Shared
from everyframe.hardware.facts import pick_device
from everyframe.parallel.grid import Deal, Grid
from everyframe.parallel.partition import shares, teams

#: Multiplications and additions, and bytes to another device, that one has a second: for the choice
#: between ways to divide, where only their ratio counts. Of a CPU, one core.
_OPERATIONS = {"cpu": 5e10, "cuda": 5e13}
_BYTES = {"cpu": 1e9, "cuda": 1e10}

#: Fast paths that don't go together with several devices, and why.
AVOIDED = {"compile": "blocks of several devices exchange tensors in their middle"}


@dataclass(frozen=True)
class Effort:
    """What one step of one video takes: operations of all branches, bytes of a number sent."""

    operations: float
    element_bytes: int


def asked_devices(request: Request, facts: MachineFacts) -> tuple[DeviceFacts, ...]:
    """The devices of a request; one of them unless it asks for several.

    Raises:
        InputError: not so many are there, or they can't work together.
    """
    if request.devices is not None:
        names = [name.strip() for name in request.devices.split(",")]
        names = [f"cuda:{name}" if name.isdigit() else name for name in names]
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
        first, count = pick_device(facts, request.device), request.num_devices or 1
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
    return found


def divide(
    request: Request,
    model: Model,
    settings: Settings,
    devices: Sequence[DeviceFacts],
    effort_of: Callable[[Settings], Effort],
    num_threads: int,
) -> Division | None:
    """How the run is divided; None for one device. `effort_of` is asked only for several.

    Raises:
        InputError: what was asked can't be had; the text says what would be right.
    """
    asked = parse_ways(request.parallel)
    weights = _weights(request, len(devices))
    _check_ways(asked, model, settings, len(devices))
    if len(devices) == 1:
        return None
    effort = effort_of(settings)
    most = min(len(devices), settings.num_videos)
    counts = [asked.data] if asked.data else list(range(most, 0, -1))
    divisions = [
        _division(model, settings, devices, weights, count, asked.cfg or 1, effort, num_threads)
        for count in counts
        if asked.cfg is None or asked.cfg * count <= len(devices)
    ]
    speed = _OPERATIONS[devices[0].kind] * (num_threads if devices[0].kind == "cpu" else 1)
    way = _BYTES[devices[0].kind]
    # Several videos at once come first where both take as long: nothing is sent between them.
    return min(divisions, key=lambda each: _seconds(each, effort, speed, way))


def idle_notes(division: Division | None) -> tuple[str, ...]:
    """Which ranks have nothing to do at times, and why."""
    whys: dict[str, list[int]] = {}
    for rank, plan in enumerate(division.ranks if division is not None else ()):
        if plan.idle:
            whys.setdefault(plan.idle, []).append(rank)
    return tuple(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {why}"
        for why, ranks in whys.items()
    )


def _weights(request: Request, num_devices: int) -> tuple[float, ...]:
    if request.shares is None:
        return (1.0,) * num_devices
    if num_devices == 1:
        raise InputError("shares has no effect on one device; give --num-devices or --devices")
    return parse_shares(request.shares, num_devices)


def _check_ways(asked: Ways, model: Model, settings: Settings, count: int) -> None:
    data, cfg = asked.data or 1, asked.cfg or 1
    shared = isinstance(model, Shared)
    branches = model.num_branches(settings) if isinstance(model, Shared) else 1
    if not shared and ((asked.cfg or 1) > 1 or (asked.sequence or 1) > 1):
        raise InputError(
            f"{model.title} makes each video on one device: parallel can be data=N with "
            "--num-videos, not cfg or sequence"
        )
    if data > settings.num_videos:
        raise InputError(
            f"parallel data={data} wants at least {data} videos, got --num-videos "
            f"{settings.num_videos}; sequence={count} divides one video"
        )
    if cfg > branches:
        why = "guidance_scale 1 has one branch" if branches == 1 else f"it has {branches} branches"
        raise InputError(f"parallel cfg={cfg}: {why}; sequence={count} divides its tokens")
    if data * cfg > count:
        raise InputError(
            f"parallel data={data},cfg={cfg} wants {data * cfg} devices or more, got {count}"
        )
    if asked.sequence is None:
        return
    wanted = data * cfg * asked.sequence
    if wanted != count:
        right = [f"sequence={count}"]
        if branches > 1 and count > 1:
            right.append("cfg=2, which parts any number of devices in two")
        raise InputError(
            f"parallel {_written(asked)} is for {wanted} devices, got {count}; for {count} it can "
            f"be auto, {' or '.join(right)}"
        )


def _written(asked: Ways) -> str:
    named = {"data": asked.data, "cfg": asked.cfg, "sequence": asked.sequence}
    return ",".join(f"{name}={number}" for name, number in named.items() if number is not None)


def _division(
    model: Model,
    settings: Settings,
    devices: Sequence[DeviceFacts],
    weights: Sequence[float],
    data: int,
    cfg: int,
    effort: Effort,
    num_threads: int,
) -> Division:
    parted = teams(len(devices), [1.0] * data, weights)
    speeds = [sum(weights[rank] for rank in group) for group in parted]
    ranks: list[RankPlan] = []
    for number, group in enumerate(parted):
        mine = tuple(weights[rank] for rank in group)
        for place, rank in enumerate(group):
            plan = RankPlan(devices[rank].torch_name, number, weights[rank])
            ranks.append(_part(plan, model, settings, mine, place, cfg, effort))
    return Division(tuple(ranks), shares(settings.num_videos, speeds), cfg, num_threads)


def _part(
    plan: RankPlan,
    model: Model,
    settings: Settings,
    weights: tuple[float, ...],
    place: int,
    cfg: int,
    effort: Effort,
) -> RankPlan:
    """That rank's part of one video's denoising, as rank `place` of its group."""
    if not isinstance(model, Shared):
        if place == 0:
            return plan
        idle = f"{model.title} makes each video on one device"
        return RankPlan(plan.device, plan.group, plan.weight, 0.0, 0.0, 0, idle)
    grid = Grid(model.num_branches(settings), *model.grid(settings))
    deal = Deal(grid, weights, cfg)
    columns, rows = len(deal.columns[place]), len(deal.rows[place])
    idle = ""
    if not columns:
        idle = "there are fewer places in a frame than devices; it decodes only"
    elif not rows:
        idle = "there are fewer frames than devices: it waits during attention in space"
    return RankPlan(
        plan.device,
        plan.group,
        plan.weight,
        columns / (grid.samples * grid.places),
        rows / (grid.samples * grid.frames),
        model.sent_bytes(settings, deal, place, effort.element_bytes),
        idle,
    )


def _seconds(division: Division, effort: Effort, speed: float, way: float) -> float:
    """How long a step of all videos takes, by nominal speeds of a device and of the way between."""
    slowest = 0.0
    heaviest = max(division.weights)
    for group, ranks in enumerate(division.groups):
        steps = [
            max(division.ranks[r].columns, division.ranks[r].rows)
            * effort.operations
            / (speed * division.ranks[r].weight / heaviest)
            + division.ranks[r].sent_bytes / way
            for r in ranks
            if division.ranks[r].weight
        ]
        slowest = max(slowest, max(steps) * division.videos[group])
    return slowest
