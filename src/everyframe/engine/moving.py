"""A run that was broken off, taken to other devices: the same plan, divided anew.

What is kept of a run is whole (latents, text, frames) and says nothing of ranks, so any number of
devices can go on with it. Precision, fast paths and repairs stay those that it was begun with; how
its work is divided, and what it takes to fit it into memory, is found anew. Read next:
`resuming.py`; `everyframe.planning.dividing`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from everyframe.core.errors import CannotRunError
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.ranks import Met
from everyframe.planning.dividing import AVOIDED
from everyframe.planning.resolve import check_feasible, prepare

#: Options that say which devices work and what each does; none of them fits other devices.
OF_RANKS = ("num_devices", "devices", "parallel", "shares", "shard_weights")


def asked_anew(request: Request, ranks: Mapping[str, Any]) -> Request:
    """The request with those devices in place of its own."""
    replaced = {*OF_RANKS, *(("device",) if ranks.get("devices") else ())}
    kept = {name: value for name, value in request.given().items() if name not in replaced}
    return Request(**{**kept, **ranks})


def divided_anew(
    old: Plan,
    request: Request,
    peers: Met | None,
    done: Collection[int],
) -> Plan:
    """`old` for the devices of `request`; videos of the seeds in `done` are made already.

    Raises:
        CannotRunError: it doesn't fit there, or would give another video.
    """
    several = request.num_ranks > 1
    paths = {
        part.name: tuple(path for path in part.paths if not (several and path in AVOIDED))
        for part in old.components
        if part.paths is not None
    }
    remedies = tuple(remedy for part in old.components for remedy in part.remedies)
    quantized = {part.name: part.precision.weights for part in old.components}
    settings = old.settings
    numbers = tuple(sorted(seed - settings.seed for seed in done))
    asked = {
        **request.given(),
        "seed": settings.seed,
        "num_videos": settings.num_videos - len(numbers),
        "remedies": remedies,
        "paths": paths,
        "quantized": quantized,
    }
    plan = prepare(
        Request(**asked),
        may_fetch=True,
        num_threads=None if peers is None else peers.num_threads,
        devices=None if peers is None else peers.devices,
    ).plan
    check_feasible(plan)
    _check_alike(old, plan)
    division = plan.division
    return replace(
        plan,
        settings=replace(plan.settings, num_videos=settings.num_videos),
        division=None if division is None else replace(division, done=numbers),
    )


def said_of_move(old: Plan, new: Plan) -> tuple[str, ...]:
    """What is said of a run that goes on elsewhere."""
    text = (
        f"begun on {_devices(old)}, goes on on {_devices(new)}: what is summed in another order "
        "differs by rounding, in float32 by about 1e-5 of the values at most"
    )
    if new.settings.savings != old.settings.savings:
        text += "; to fit there it is computed in other pieces"
    return (text,)


def _devices(plan: Plan) -> str:
    number = 1 if plan.division is None else len(plan.division.ranks)
    return "one device" if number == 1 else f"{number} devices"


def _check_alike(old: Plan, new: Plan) -> None:
    if old.device.name != new.device.name:
        raise CannotRunError(
            f"the run was on {old.device.torch_name} ({old.device.name}), and would go on on "
            f"{new.device.torch_name} ({new.device.name}): another device gives another video, so "
            "it can't be gone on with there, but made again from its beginning"
        )
    for part in old.components:
        if new.component(part.name).precision != part.precision:
            raise CannotRunError(
                f"the {part.title} would go on in {new.component(part.name).precision} "
                f"there, and was begun in {part.precision}; give the devices that it was "
                "begun on, or make it again from its beginning"
            )
