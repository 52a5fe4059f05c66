"""Replan a run: move an interrupted run to other devices, or fit it into less memory.

Saved state is whole (latents, text, frames) and independent of ranks, so any number of devices can
resume it. Precision, fast paths and repairs stay those of the original plan; the division of work
and the memory fallbacks are planned again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from everyframe.core.errors import CannotRunError, OutOfMemoryInfo
from everyframe.core.events import Repaired, event_of
from everyframe.core.plan import Plan
from everyframe.core.quality import recorded_method
from everyframe.core.request import Request
from everyframe.engine.distributed import Peers
from everyframe.planning.memory.component_memory import holders_among
from everyframe.planning.parallelism import AVOIDED
from everyframe.planning.resolve import check_feasible, prepare
from everyframe.runs.run_state import RunState
from everyframe.runtime.interface import DryRunSpec, ModelSpec
from everyframe.runtime.memory.memory_fallbacks import MemoryFallback, RemainingFallbacks

#: Options about devices and shares, which don't carry over to other devices.
OF_RANKS = ("num_devices", "devices", "parallel", "shares", "shard_weights")


def with_devices(request: Request, ranks: Mapping[str, Any]) -> Request:
    """The request with these device options in place of its own."""
    replaced = {*OF_RANKS, *(("device",) if ranks.get("devices") else ())}
    given = {name: value for name, value in request.given().items() if name not in replaced}
    return Request(**{**given, **ranks})


def replan_for_devices(
    old: Plan,
    request: Request,
    peers: Peers | None,
    done: Collection[int],
) -> Plan:
    """Replan `old` for the devices of `request`; videos of the seeds in `done` are finished.

    Raises:
        CannotRunError: it doesn't fit on those devices, or would give another video.
    """
    several = request.num_ranks > 1
    paths = {
        each.name: tuple(path for path in each.fast_paths if not (several and path in AVOIDED))
        for each in old.components
        if each.fast_paths is not None
    }
    repairs = tuple(repair for each in old.components for repair in each.repairs)
    quantized = {each.name: each.precision.weight_dtype for each in old.components}
    settings = old.settings
    numbers = tuple(sorted(seed - settings.seed for seed in done))
    asked = {
        **request.given(),
        "seed": settings.seed,
        "num_videos": settings.num_videos - len(numbers),
        "repairs": repairs,
        "fast_paths": paths,
        "quantized": quantized,
        "method": recorded_method(settings.method, quantized.values()),
    }
    plan = prepare(
        Request(**asked),
        may_fetch=True,
        num_threads=None if peers is None else peers.num_threads,
        devices=None if peers is None else peers.devices,
    ).plan
    check_feasible(plan)
    _check_alike(old, plan)
    division = plan.parallel
    return replace(
        plan,
        settings=replace(plan.settings, num_videos=settings.num_videos),
        parallel=None if division is None else replace(division, finished_videos=numbers),
    )


def change_notes(old: Plan, new: Plan) -> tuple[str, ...]:
    """Notes about a run that resumes on other devices."""
    text = (
        f"begun on {_devices(old)}, resumed on {_devices(new)}: sums in another order differ by "
        "rounding, in float32 by about 1e-5 of the values at most"
    )
    if new.settings.savings != old.settings.savings:
        text += "; to fit there, it is computed in other pieces"
    return (text,)


def _devices(plan: Plan) -> str:
    number = 1 if plan.parallel is None else len(plan.parallel.ranks)
    return "one device" if number == 1 else f"{number} devices"


def _check_alike(old: Plan, new: Plan) -> None:
    if old.device.name != new.device.name:
        raise CannotRunError(
            f"the run was on {old.device.torch_name} ({old.device.name}), and would resume on "
            f"{new.device.torch_name} ({new.device.name}): another device gives another video, so "
            "it cannot be resumed there; generate it again from the start"
        )
    for component in old.components:
        if new.component(component.name).precision != component.precision:
            raise CannotRunError(
                f"the {component.title} would resume in {new.component(component.name).precision} "
                f"there, and was begun in {component.precision}; name the devices that it was "
                "begun on, or generate it again from the start"
            )


def apply_next_fallback(
    plan: Plan, model: ModelSpec, out_of_memory: OutOfMemoryInfo
) -> tuple[Plan, MemoryFallback] | None:
    """Apply the next memory fallback on every rank; return the plan and the fallback.

    None if no fallback is left.
    """
    division = plan.parallel
    left = RemainingFallbacks(
        plan,
        model.savings if isinstance(model, DryRunSpec) else None,
        out_of_memory.stage,
        movable={each.name for each in plan.components if each.stage == out_of_memory.stage},
        takes_turns=True,
        holders=1 if division is None else holders_among(model, division),
    )
    found = left.next(out_of_memory.components)
    if found is None:
        return None
    title = plan.component(found.component).title if found.component else plan.title
    return left.plan, replace(found, message=f"{title}: {found.message}")


def replan_with_less_memory(
    plan: Plan, model: ModelSpec, out_of_memory: OutOfMemoryInfo
) -> tuple[Plan, Repaired]:
    """The plan with the next memory fallback on all ranks, and the event that reports it.

    Raises:
        CannotRunError: no fallback is left.
    """
    found = apply_next_fallback(plan, model, out_of_memory)
    where = f"{out_of_memory.where}, on rank {out_of_memory.rank}: out of memory"
    if found is None:
        raise CannotRunError(
            f"{where}, and no memory fallback is left on so many devices; resume it from the last "
            "step on more devices (everyframe resume --num-devices), or use a smaller size or "
            f"num_frames ({out_of_memory.message})"
        )
    plan, fallback = found
    why = (
        f"{where} ({out_of_memory.message}), in a step that several devices compute together; all "
        "resume from the last saved step"
    )
    component = out_of_memory.components[0] if len(out_of_memory.components) == 1 else ""
    return plan, replace(fallback, component=component).event(
        out_of_memory.stage, out_of_memory.step, why
    )


def applied_fallbacks(written: Iterable[Mapping[str, Any]]) -> tuple[Repaired, ...]:
    """Read from the run folder the memory fallbacks already applied to all ranks."""
    events = (event_of(each) for each in written)
    return tuple(event for event in events if isinstance(event, Repaired))


def add_fallbacks(progress: RunState, fallbacks: Iterable[Repaired]) -> None:
    """Add earlier memory fallbacks to the run state, which may have been saved before them."""
    known = [{**each, "clip": None} for each in progress.repairs]
    entries = [{"clip": None, **event.to_json()} for event in fallbacks]
    progress.repairs[:0] = [each for each in entries if each not in known]
