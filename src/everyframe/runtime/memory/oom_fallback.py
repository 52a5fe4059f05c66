"""Out-of-memory handling in a running stage: apply memory fallbacks and repeat the call.

Fallbacks are tried from the smallest change to the largest (`memory_fallbacks.py`). Each holds for
the rest of the stage, for all of its videos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from everyframe.core.errors import CannotRunError, DistributedOutOfMemoryError, OutOfMemoryInfo
from everyframe.core.plan import Plan, Settings
from everyframe.hardware.memory import empty_cache, out_of_memory
from everyframe.runtime.batch_member import change_modules
from everyframe.runtime.interface import MemorySavings
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.memory_fallbacks import (
    CACHE_RELEASED,
    MemoryFallback,
    RemainingFallbacks,
)
from everyframe.runtime.repair.repairs import GuardLog
from everyframe.runtime.run_logs import OomEvent

if TYPE_CHECKING:
    from everyframe.runtime.interface import VideoState


class CallCounter:
    """Identify the calls of a stage, the same way in a resumed run."""

    def __init__(self) -> None:
        self._video: VideoState | None = None
        self._left: list[OomEvent] | None = None
        self._first: dict[tuple[int | None, int], int] = {}

    def of(self, video: VideoState) -> None:
        """Switch to another video."""
        self._video = video
        if self._left is None:
            self._left = [] if video.oom_log is None else [*video.oom_log.known()]

    def now(self, number: int) -> OomEvent:
        """Out-of-memory event for the call that the stage counts as `number`."""
        seed, step = (None, 0) if self._video is None else (self._video.seed, self._video.step)
        # A resumed run that has finished other videos counts from another number.
        return OomEvent(seed, step, number - self._first.setdefault((seed, step), number))

    def keep(self, event: OomEvent) -> None:
        """Save the event with its video, if the run saves any."""
        if self._video is not None and self._video.oom_log is not None:
            self._video.oom_log.keep(event)

    def due(self, number: int) -> Iterator[tuple[OomEvent, bool]]:
        """Each saved event up to this call, and whether it happened in exactly this call."""
        now = self.now(number)
        while self._left:
            is_now = replace(self._left[0], at="") == now
            if not is_now and not self._is_past(self._left[0], now):
                return
            yield self._left.pop(0), is_now

    def _is_past(self, event: OomEvent, now: OomEvent) -> bool:
        """Whether the event was in a step or video that a resumed run does not compute again."""
        if event.seed == now.seed:
            return event.step < now.step
        # Videos come in seed order, except where each batch of frames passes through all.
        seen = {seed for seed, _ in self._first}
        return event.seed not in seen and (event.seed or 0) < (now.seed or 0)


def together(
    stage: str, step: int, components: Iterable[str], where: str, error_text: str
) -> DistributedOutOfMemoryError:
    """Error of a rank that is out of memory while others wait for it; see `OutOfMemoryInfo`."""
    return DistributedOutOfMemoryError(
        f"{where}: out of memory in a step that several devices compute together, where no "
        "device can use less alone; resume it from the last saved step on more devices or with "
        f"--shard-weights (everyframe resume), or use a smaller size or num_frames ({error_text})",
        OutOfMemoryInfo(stage, step, tuple(components), where, error_text),
    )


_Result = TypeVar("_Result")


class OomFallbacks:
    """Apply the memory fallbacks of a stage to its loaded modules, each once.

    Modules that may be moved as a whole, one on the device at a time, have `takes_turns`.
    `free_others` frees what other runs left in memory, and says whether there was anything; it
    comes before any fallback.

    Attributes:
        moments: identifies the calls in which they were applied.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[str, nn.Module],
        savings: MemorySavings | None,
        stage: str,
        *,
        takes_turns: bool = False,
        cache_note: str = CACHE_RELEASED,
        free_others: Callable[[], bool] | None = None,
    ) -> None:
        self.free_others = free_others or (lambda: False)
        self.moments = CallCounter()
        self._modules = modules
        self._left = RemainingFallbacks(
            plan,
            savings,
            stage,
            movable=modules.keys(),
            takes_turns=takes_turns,
            cache_note=cache_note,
        )

    @property
    def settings(self) -> Settings:
        """The plan's settings plus the fallbacks so far."""
        return self._left.plan.settings

    @property
    def tried(self) -> list[str]:
        """The fallbacks so far, in words."""
        return [message for _, message in self._left.taken]

    def with_fallbacks(
        self,
        calls: GuardLog,
        step: int,
        compute: Callable[[], _Result],
        again: Callable[[], _Result] | None = None,
    ) -> _Result:
        """Run `compute`, applying fallbacks until it fits; see `Guard.with_fallbacks`.

        After the first fallback `again` is called in its place, if there is one.

        Raises:
            CannotRunError: no fallback is left.
        """
        for fallback in self.again(step):
            why = f"{calls.where(step)}: out of memory here in the interrupted run"
            calls.add_events(
                fallback.event(calls.stage, step, f"{why}; using the same fallback again")
            )
        while True:
            # Every call passes here; `catch_out_of_memory` would add a frame to each.
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                failed = out_of_memory(error)
            # Here the traceback is gone, which keeps the failed call's tensors alive.
            if self.free_others():
                continue
            done = self.at(step)
            if done is None:
                raise CannotRunError(
                    f"{calls.where(step)}: out of memory, and no memory fallback is left; use a "
                    "smaller size or num_frames, or close other programs that use this memory "
                    f"({failed.message})"
                )
            why = f"{calls.where(step)}: out of memory ({failed.message})"
            calls.add_events(
                done.event(calls.stage, step, f"{why}; computing it again with less memory")
            )
            compute = again or compute

    def next(self, at: str = "") -> MemoryFallback | None:
        """Apply the next fallback, after emptying torch's cache. None if there is none left.

        `at` is the component that ran out of memory, if the stage knows. Raises `LeftBatchError` in
        a batch, whose runs share the components.
        """
        change_modules("memory ran out")
        empty_cache()
        found = self._left.next(self._components(at))
        if found is not None:
            self._apply(found, self._left.plan)
        return found

    def at(self, number: int, at: str = "") -> MemoryFallback | None:
        """Apply the next fallback for that call, and save an out-of-memory event if one is left."""
        found = self.next(at)
        if found is not None:
            self.moments.keep(replace(self.moments.now(number), at=at))
        return found

    def again(self, number: int) -> Iterator[MemoryFallback]:
        """Reapply the fallbacks of the interrupted run, up to that call.

        Yields those of the call itself, which have had no event yet.
        """
        for event, is_now in self.moments.due(number):
            found = self.next(event.at)
            if found is not None and is_now:
                yield found

    def _components(self, at: str) -> Sequence[str]:
        """Components whose fallbacks help if `at` ran out of memory."""
        return [*self._modules]

    def _apply(self, fallback: MemoryFallback, plan: Plan) -> None:
        """Change the modules as the fallback says; `plan` includes it."""
        if fallback.block_offload:
            module = self._modules[fallback.component]
            module.to("cpu")
            offload.apply(module, plan.component(fallback.component).device)
