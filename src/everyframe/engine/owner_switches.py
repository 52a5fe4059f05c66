"""Torch's switches of whoever gave a pipeline in memory: they hold for its call, and are planned.

Nothing is set here, only looked at. Read next: `run.py`; `everyframe.hardware.thread_state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from everyframe.core.plan import Plan, Switches
from everyframe.planning.resolve import LoadedModel
from everyframe.runtime.interface import InMemory


def switches_of(given: LoadedModel | None) -> Switches | None:
    """Those of a model in memory; None where the plan sets its own."""
    model: Any = None if given is None else given.model
    return model.switches if isinstance(model, InMemory) else None


def threads_for(given: LoadedModel | None, wanted: int | None) -> int | None:
    """The owner's number of threads, else what is wanted."""
    switches = switches_of(given)
    return wanted if switches is None else switches.num_threads


def with_owner_switches(plan: Plan, given: LoadedModel | None) -> Plan:
    """The plan with the switches that hold for a model in memory now."""
    switches = switches_of(given)
    if switches is None:
        return plan
    return replace(plan, num_threads=switches.num_threads, switches=switches)


def thread_count_notes(plan: Plan, wanted: int | None) -> Iterator[str]:
    """What is said where a record asks for another number of threads than the owner has."""
    if plan.switches is not None and wanted not in (None, plan.num_threads):
        yield (
            f"the record is of {wanted} threads, and torch has {plan.num_threads} here, which "
            f"gives other last bits; torch.set_num_threads({wanted}) before the call gives the same"
        )
