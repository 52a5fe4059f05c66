"""Out-of-memory handling in a running stage: apply memory fallbacks and repeat the call.

Fallbacks are tried from the smallest change to the largest (`memory_fallbacks.py`). Each holds for
the rest of the stage, for all of its videos. What a plan chooses before the run is in
`everyframe.planning.memory_fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from everyframe.core.errors import CannotRunError, DistributedOutOfMemoryError, OutOfMemoryInfo
from everyframe.core.events import Repaired
from everyframe.core.plan import Plan
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory, empty_cache
from everyframe.runtime import offload
from everyframe.runtime.interface import MemorySavings
from everyframe.runtime.memory_fallbacks import memory_fallbacks
from everyframe.runtime.repairs import GuardLog
from everyframe.runtime.run_logs import OomEvent

if TYPE_CHECKING:
    from everyframe.runtime.interface import VideoState

#: The first fallback on an accelerator: torch's cache is emptied.
GIVEN_BACK = "what was kept for later is given back"


class CallCounter:
    """Identify the calls of a stage, the same way in a resumed run."""

    def __init__(self) -> None:
        self._take: VideoState | None = None
        self._left: list[OomEvent] | None = None
        self._first: dict[tuple[int | None, int], int] = {}

    def of(self, take: VideoState) -> None:
        """Switch to another video."""
        self._take = take
        if self._left is None:
            self._left = [] if take.shortages is None else [*take.shortages.known()]

    def now(self, number: int) -> OomEvent:
        """Out-of-memory event for the call that the stage counts as `number`."""
        seed, step = (None, 0) if self._take is None else (self._take.seed, self._take.step)
        # Where other videos were done before the run was broken off, numbers are others.
        return OomEvent(seed, step, number - self._first.setdefault((seed, step), number))

    def keep(self, shortage: OomEvent) -> None:
        """Save the event with its video, if the run saves any."""
        if self._take is not None and self._take.shortages is not None:
            self._take.shortages.keep(shortage)

    def due(self, number: int) -> Iterator[bool]:
        """For each saved event up to this call: whether it happened in exactly this call."""
        now = self.now(number)
        while self._left and (self._left[0] == now or self._is_past(self._left[0], now)):
            yield self._left.pop(0) == now

    def _is_past(self, shortage: OomEvent, now: OomEvent) -> bool:
        """Whether the event was in a step or video that a resumed run does not compute again."""
        if shortage.seed == now.seed:
            return shortage.step < now.step
        # Videos come in the order of their seeds, but where each lot of frames goes through all.
        seen = {seed for seed, _ in self._first}
        return shortage.seed not in seen and (shortage.seed or 0) < (now.seed or 0)


def together(
    stage: str, step: int, components: Iterable[str], where: str, said: str
) -> DistributedOutOfMemoryError:
    """Error of a rank that is out of memory while others wait for it; see `OutOfMemoryInfo`."""
    return DistributedOutOfMemoryError(
        f"{where}: out of memory in the middle of what several devices compute together, where "
        "none can do with less by itself; more devices or --shard-weights may go on from the last "
        f"step (everyframe resume), and a smaller size or num_frames does ({said})",
        OutOfMemoryInfo(stage, step, tuple(components), where, said),
    )


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class AppliedFallback:
    """A memory fallback that was applied to a component, with its note."""

    component: str
    says: str

    def event(self, stage: str, step: int, why: str, seed: int | None = None) -> Repaired:
        """The event: `why` it was applied in that step; `seed` if it concerns one video only."""
        return Repaired(
            stage, step, self.component, "", "", "memory", "", "", self.says,
            f"{why}: {self.says}", seed,
        )  # fmt: skip


class MemoryFallbacks:
    """Apply the memory fallbacks of a stage, each once.

    Attributes:
        settings: the plan's settings plus the fallbacks so far.
        moments: identifies the calls in which they were applied.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Mapping[str, nn.Module],
        savings: MemorySavings | None,
        stage: str | None = None,
    ) -> None:
        self.settings = plan.settings
        self.moments = CallCounter()
        self._plan = plan
        self._parts = parts
        self._savings = savings
        self._stage = stage
        self._left: Iterator[AppliedFallback] | None = None

    def spared(
        self,
        calls: GuardLog,
        step: int,
        compute: Callable[[], _Result],
        again: Callable[[], _Result] | None,
    ) -> _Result:
        """Run `compute`, applying fallbacks until it fits; see `Guard.spared`.

        After the first fallback `again` is called in its place, if there is one.

        Raises:
            CannotRunError: no fallback is left.
        """
        for relief in self.again(step):
            why = f"{calls.where(step)}: memory ran out here before the run was broken off"
            calls.tell(relief.event(calls.stage, step, f"{why}; it goes on"))
        while True:
            result = catch_out_of_memory(compute)
            if not isinstance(result, OutOfMemory):
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

    def next(self) -> AppliedFallback | None:
        """Apply the next fallback, after emptying torch's cache. None if there is none left."""
        empty_cache()
        if self._left is None:
            # Not sooner: it holds this object and with it the parts, which would then stay in
            # memory until the collector looks for cycles, in every stage that needs no relief.
            self._left = self._ways()
        return next(self._left, None)

    def at(self, number: int) -> AppliedFallback | None:
        """Apply the next fallback for that call, and save an out-of-memory event if one is left."""
        relief = self.next()
        if relief is not None:
            self.moments.keep(self.moments.now(number))
        return relief

    def again(self, number: int) -> Iterator[AppliedFallback]:
        """Reapply the fallbacks of the interrupted run, up to that call.

        Yields those of the call itself, which have had no event yet.
        """
        for is_now in self.moments.due(number):
            relief = self.next()
            if relief is not None and is_now:
                yield relief

    def _ways(self) -> Iterator[AppliedFallback]:
        on_host = self._plan.device.kind == "cpu"
        if not on_host:
            yield AppliedFallback("", GIVEN_BACK)
        names, may_wait = tuple(self._parts), not on_host
        for way in memory_fallbacks(
            names, self.settings, self._savings, may_wait=may_wait, stage=self._stage
        ):
            planned = self._plan.component(way.component)
            if way.offload and planned.offload:
                continue
            if way.offload:
                part = self._parts[way.component]
                part.to("cpu")
                offload.apply(part, planned.device)
            self.settings = way.settings
            yield AppliedFallback(way.component, way.says)
