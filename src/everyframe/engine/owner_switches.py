"""Read the torch switches set by the owner of an in-memory pipeline; they hold for its call.

This module changes no switch. The values go into the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from everyframe.core.plan import Plan, Switches
from everyframe.planning.resolve import LoadedModel
from everyframe.runtime.interface import InMemory


def switches_of(given: LoadedModel | None) -> Switches | None:
    """Switches in force for an in-memory model; None if the plan sets its own."""
    model: Any = None if given is None else given.model
    return model.switches if isinstance(model, InMemory) else None


def threads_for(given: LoadedModel | None, wanted: int | None) -> int | None:
    """The owner's number of threads, or `wanted` without an in-memory model."""
    switches = switches_of(given)
    return wanted if switches is None else switches.num_threads


def with_owner_switches(plan: Plan, given: LoadedModel | None) -> Plan:
    """The plan with the switches that are now in force for an in-memory model."""
    switches = switches_of(given)
    if switches is None:
        return plan
    return replace(plan, num_threads=switches.num_threads, switches=switches)


def thread_count_notes(plan: Plan, wanted: int | None) -> Iterator[str]:
    """Note that a record asks for another number of threads than the owner set."""
    if plan.switches is not None and wanted not in (None, plan.num_threads):
        yield (
            f"the record is of {wanted} threads, and torch has {plan.num_threads} here, which "
            f"gives other last bits; torch.set_num_threads({wanted}) before the call gives the same"
        )
