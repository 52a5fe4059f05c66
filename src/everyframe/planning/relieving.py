"""A plan whose ranks ran out of memory together, with one thing more done so that less is needed.

The next way of those that plans and stages take, in the same order (`everyframe.families.sparing`):
here for a plan that runs already, so nothing of it is chosen anew, and its forecasts stay those of
the beginning. Not here: who starts the ranks again (`everyframe.engine.launch`), and what a stage
does by itself (`everyframe.families.reliefs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from everyframe.core.errors import Scarcity
from everyframe.core.plan import ComponentPlan, Plan
from everyframe.families.family import Model, Rehearsing
from everyframe.families.sparing import BY_TURNS, Way, ways
from everyframe.planning.components import holders_among


def relieved(plan: Plan, model: Model, scarcity: Scarcity) -> tuple[Plan, str] | None:
    """The plan in which that takes less memory on every rank, and what is other in it.

    None where nothing is left that takes less.
    """
    return next(_plans(plan, model, scarcity), None)


def _plans(plan: Plan, model: Model, scarcity: Scarcity) -> Iterator[tuple[Plan, str]]:
    may_wait = plan.device.kind != "cpu"
    beside = [part for part in plan.components if part.stage == scarcity.stage]
    idle = [part for part in beside if not (_is_elsewhere(part) or part.by_turns)]
    if may_wait and len(beside) > 1 and idle:
        turning = [replace(part, by_turns=True) for part in idle]
        yield _with(plan, turning), f"{plan.title}: {BY_TURNS}"
    division = plan.division
    for way in ways(
        scarcity.components,
        plan.settings,
        model.savings if isinstance(model, Rehearsing) else None,
        may_wait=may_wait,
        stage=scarcity.stage,
        holders=1 if division is None else holders_among(model, division),
    ):
        part = plan.component(way.component)
        if part.offload if way.offload else way.moves_weights and _is_elsewhere(part):
            continue
        moved = _moved(part, way) if way.moves_weights else part
        yield replace(_with(plan, [moved]), settings=way.settings), f"{part.title}: {way.says}"


def _is_elsewhere(part: ComponentPlan) -> bool:
    """Whether not all of its weights stay on the device."""
    return part.offload or part.holders > 1


def _moved(part: ComponentPlan, way: Way) -> ComponentPlan:
    """The component with its weights where that way has them."""
    return replace(
        part,
        offload=way.offload,
        holders=way.holders,
        by_turns=False,
        resident_bytes=None,
    )


def _with(plan: Plan, parts: Sequence[ComponentPlan]) -> Plan:
    """The plan with these in place of its components of their names."""
    of_names = {part.name: part for part in parts}
    return replace(
        plan, components=tuple(of_names.get(part.name, part) for part in plan.components)
    )
