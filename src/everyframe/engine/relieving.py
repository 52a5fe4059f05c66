"""Ranks that ran out of memory together begin anew in less of it: what is said, and what is kept.

What one rank computes by itself it repairs by itself. In the middle of what all of them compute
none can, so all are ended, and started again from the last step that was kept with one thing more
done for each. Read next: `launch.py`, which starts them; `resuming.py`, which they go on by;
`everyframe.planning.relieving` for what is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everyframe.core.errors import CannotRunError, Scarcity
from everyframe.core.events import Repaired, event_of
from everyframe.core.plan import Plan
from everyframe.families.family import Model
from everyframe.families.reliefs import Relief
from everyframe.planning.relieving import relieved
from everyframe.runs.keeper import Progress


def in_less(plan: Plan, model: Model, scarcity: Scarcity) -> tuple[Plan, Repaired]:
    """The plan with the next thing done so that all ranks need less, and what is told of it.

    Raises:
        CannotRunError: nothing is left that takes less.
    """
    found = relieved(plan, model, scarcity)
    where = f"{scarcity.where}, on rank {scarcity.rank}: out of memory"
    if found is None:
        raise CannotRunError(
            f"{where}, and nothing is left that takes less on so many devices; more of them may go "
            "on from the last step (everyframe resume --num-devices), and a smaller size or "
            f"num_frames does ({scarcity.said})"
        )
    plan, says = found
    why = (
        f"{where} ({scarcity.said}), in the middle of what several devices compute together; all "
        "go on from the last step that was kept"
    )
    component = scarcity.components[0] if len(scarcity.components) == 1 else ""
    return plan, Relief(component, says).event(scarcity.stage, scarcity.step, why)


def relieved_of(written: Iterable[Mapping[str, Any]]) -> tuple[Repaired, ...]:
    """What a run's folder says was done before so that all ranks need less."""
    events = (event_of(each) for each in written)
    return tuple(event for event in events if isinstance(event, Repaired))


def remind(progress: Progress, relieved: Iterable[Repaired]) -> None:
    """Have the record hold it, which a state of before does not."""
    known = [{**each, "clip": None} for each in progress.repairs]
    told = [{"clip": None, **event.to_json()} for event in relieved]
    progress.repairs[:0] = [each for each in told if each not in known]
