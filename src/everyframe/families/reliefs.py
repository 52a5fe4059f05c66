"""Too little memory while a stage runs: done in less, from the least change to the most.

Whatever is chosen holds for the rest of the stage, for all of its videos. Not here: which ways
there are and in which order (`sparing.py`), when they were taken (`shortages.py`), and what a plan
chooses before anything runs (`everyframe.planning.fitting`). Read next: `guarding.py`, whose calls
are repeated; `offload.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from everyframe.core.errors import CannotRunError
from everyframe.core.events import Repaired
from everyframe.core.plan import Plan
from everyframe.families import offload
from everyframe.families.family import Savings
from everyframe.families.shortages import Moments
from everyframe.families.sparing import ways
from everyframe.families.telling import Calls
from everyframe.hardware.peak import TooLittle, give_back, in_memory

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Relief:
    """What was done, as a person reads it, and for which component."""

    component: str
    says: str

    def event(self, stage: str, step: int, why: str, seed: int | None = None) -> Repaired:
        """What tells of it: `why` it was done in that step, and for which video alone, if so."""
        return Repaired(
            stage, step, self.component, "", "", "memory", "", "", self.says,
            f"{why}: {self.says}", seed,
        )  # fmt: skip


class Reliefs:
    """The ways to do with less memory in a stage, each once; `settings` are those that hold by now.

    `moments` says in which calls.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Mapping[str, nn.Module],
        savings: Savings | None,
        stage: str | None = None,
    ) -> None:
        self.settings = plan.settings
        self.moments = Moments()
        self._plan = plan
        self._parts = parts
        self._savings = savings
        self._stage = stage
        self._left: Iterator[Relief] | None = None

    def spared(
        self,
        calls: Calls,
        step: int,
        compute: Callable[[], _Result],
        again: Callable[[], _Result] | None,
    ) -> _Result:
        """The result of `compute`, or of `again` if given once something is done; see `Guard`."""
        for relief in self.again(step):
            why = f"{calls.where(step)}: memory ran out here before the run was broken off"
            calls.tell(relief.event(calls.stage, step, f"{why}; it goes on"))
        while True:
            result = in_memory(compute)
            if not isinstance(result, TooLittle):
                return result
            done = self.at(step)
            if done is None:
                raise CannotRunError(
                    f"{calls.where(step)}: out of memory, and nothing is left that takes less; a "
                    "smaller size or num_frames does, and another program may hold what the plan "
                    f"counted on ({result.said})"
                )
            why = f"{calls.where(step)}: out of memory ({result.said})"
            calls.tell(done.event(calls.stage, step, f"{why}; it goes on"))
            compute = again or compute

    def next(self) -> Relief | None:
        """Do the next one; None where there is none left. What torch keeps is given back first."""
        give_back()
        if self._left is None:
            # Not sooner: it holds this object and with it the parts, which would then stay in
            # memory until the collector looks for cycles, in every stage that needs no relief.
            self._left = self._ways()
        return next(self._left, None)

    def at(self, number: int) -> Relief | None:
        """Do the next one for the call of that number; it is kept before, if there is one."""
        relief = self.next()
        if relief is not None:
            self.moments.keep(self.moments.now(number))
        return relief

    def again(self, number: int) -> Iterator[Relief]:
        """Do those that this run needed before it was broken off, up to the call of that number.

        Yields those of the call itself, of which nobody was told.
        """
        for is_now in self.moments.due(number):
            relief = self.next()
            if relief is not None and is_now:
                yield relief

    def _ways(self) -> Iterator[Relief]:
        on_host = self._plan.device.kind == "cpu"
        if not on_host:
            yield Relief("", "what was kept for later is given back")
        names, may_wait = tuple(self._parts), not on_host
        for way in ways(names, self.settings, self._savings, may_wait=may_wait, stage=self._stage):
            planned = self._plan.component(way.component)
            if way.offload and planned.offload:
                continue
            if way.offload:
                part = self._parts[way.component]
                part.to("cpu")
                offload.apply(part, planned.device)
            self.settings = way.settings
            yield Relief(way.component, way.says)
