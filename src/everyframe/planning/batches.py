"""Plan batches: how many videos of several requests a server may compute in one step."""

from __future__ import annotations

from dataclasses import replace

from everyframe.core.bytes import USABLE_SHARE
from everyframe.core.plan import BatchPlan, Plan
from everyframe.fast_paths.batch_certificates import (
    MOST_VIDEOS,
    batched_components,
    certificates_of,
    has_compiled_blocks,
)
from everyframe.runtime.interface import ModelSpec, WarmSpec


def with_batch(plan: Plan, model: ModelSpec) -> Plan:
    """The plan with its batches: as many videos as pay, as far as that is known, and have room."""
    if not isinstance(model, WarmSpec):
        return plan
    if has_compiled_blocks(plan):
        return replace(plan, batch=BatchPlan(1, "compiled blocks compute one video at a time"))
    if not batched_components(plan):
        return plan
    known = certificates_of(plan)
    room = range(2, min(MOST_VIDEOS, _most_by_memory(plan)) + 1)
    numbers = [each for each in room if each not in known or known[each].verdict == "certified"]
    if not room:
        batch = BatchPlan(1, "memory has room for one video at a time")
    elif not numbers:
        batch = BatchPlan(1, known[room[0]].reason, known[room[0]].gain)
    else:
        # An untried size counts, unless a larger one is known to pay.
        best = max(numbers, key=lambda each: known[each].gain or 0.0 if each in known else 0.0)
        if numbers[-1] not in known:
            best = numbers[-1]
        found = known.get(best)
        why = "the first batch tries it" if found is None else found.reason
        batch = BatchPlan(best, why, None if found is None else found.gain)
    return replace(plan, batch=batch)


def _most_by_memory(plan: Plan) -> int:
    """Videos that fit: runs of a batch may be in any stage, so all components stay loaded."""
    usable = plan.device.free_memory * USABLE_SHARE
    weights = sum(each.weight_bytes for each in plan.components)
    left = usable - weights - max(each.working_bytes for each in plan.components)
    each = sum(component.working_bytes for component in batched_components(plan))
    return 1 + max(0, int(left / max(each, 1)))
