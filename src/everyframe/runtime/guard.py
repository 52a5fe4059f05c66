"""The guard: what a stage computes is watched, and what goes wrong is repaired where it arose.

Every result of a component is looked at by one reduction. When it is not finite the call, whose
inputs are still there, is repeated, the operation is found that the result comes of, and the module
around it is raised by one rung of precision; so on until the result is finite, or no rung is left,
which is an error that names the place. A stage hands on `events` of what was repaired. Without a
hit nothing is computed that would not be without a guard, so nothing changes. Read next:
`repair_search.py`, `repairs.py`, `stages.py`, `everyframe.numerics.fault_locator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note, Repaired
from everyframe.core.plan import Plan, Repair, Settings
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory
from everyframe.numerics.fault_locator import Fault, bad_weights
from everyframe.numerics.overflow_probe import OverflowProbe, may_overflow
from everyframe.numerics.tensor_stats import Range, blank_frames, value_range
from everyframe.precision.dtypes import dtype_name
from everyframe.runtime.interface import MemorySavings, VideoState
from everyframe.runtime.oom_fallback import MemoryFallbacks, together
from everyframe.runtime.repair_search import RepairSearch, RepairStep
from everyframe.runtime.repairs import GuardLog, RepairSet, asks_for, describe_fault, weights_told

_Result = TypeVar("_Result")

#: A step's answer this many times as large as any before is told.
_JUMP = 100.0
#: Frames whose values (-1..1) differ by less than one of 255 steps are of one colour.
_ONE_COLOUR = 2 / 255


class GivenError(NumericsError):
    """What a component was called with is not finite; whoever calls it says so as a NumericsError.

    Others know it by that name alone, so it is not to leave a stage.
    """


class Guard:
    """Watches the components `parts` of one stage, by name, for as long as the stage runs.

    What it counts, and what of, is told in its messages: "step 3 of denoise", where nothing else is
    said. Ranks that compute one answer together look for its fault each by itself, in ``apart()``.
    """

    def __init__(
        self,
        plan: Plan,
        stage: str,
        parts: Mapping[str, nn.Module],
        *,
        counts: str = "step",
        of: str = "",
        savings: MemorySavings | None = None,
        apart: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._plan, self._apart = plan, apart
        self._parts = dict(parts)
        self._calls = GuardLog(plan.device, stage, counts, of or stage)
        self._repairs = RepairSet(plan.device, parts)
        self._reliefs = MemoryFallbacks(plan, parts, savings, stage)
        self._take: VideoState | None = None
        self._largest = 0.0
        self._is_probed = False

    def apart(self) -> AbstractContextManager[None]:
        """Within, this process computes alone what others have a part in."""
        return nullcontext() if self._apart is None else self._apart()

    @property
    def settings(self) -> Settings:
        """The plan's settings, with what had to be done by now to need less memory."""
        return self._reliefs.settings

    @property
    def has_repaired(self) -> bool:
        """Whether anything is repaired for the video that is being made."""
        return bool(self._repairs)

    def take(self, take: VideoState) -> None:
        """From here on this video is worked on, as it would be alone.

        It has the repairs that it needed before in this stage, and not those of another.
        """
        if take is self._take:
            return
        self._repairs.undo()
        for remedy in take.remedies:
            if remedy.component in self._parts:
                self._repairs.put_on(remedy)
        self._take, self._largest, self._is_probed = take, 0.0, False
        self._reliefs.moments.of(take)

    def join(self) -> None:
        """Have the components take what is handed on to them wider than they are, until `end`."""
        self._repairs.join()

    def end(self) -> None:
        """Take every repair off; the components are as they were, bit for bit."""
        self._repairs.undo()

    def events(self) -> Iterator[Event]:
        """What was repaired and noticed since this was last asked."""
        return self._calls.events()

    def hear(self, events: Iterable[Event]) -> None:
        """Hand on with its own what the guards of other ranks told."""
        self._calls.tell(*events)

    def call(self, step: int, compute: Callable[[], _Result]) -> _Result:
        """The result of `compute`, all of whose floating tensors are finite.

        `compute` is called again where they are not. `step` counts the stage's calls from 1.

        Raises:
            NumericsError: no rung of precision helps; names step, module and operation.
        """
        probe = self.probe()
        with probe or nullcontext():
            result = self.spared(step, compute)
        if not value_range(result).is_finite:
            return self.repaired(step, compute)
        return self.probed(step, probe, result, compute)

    def probe(self) -> OverflowProbe | None:
        """For a video's first call of components in float16, what it is to be made within.

        Ranks that compute one answer together have none: each sees its own share alone.
        """
        if self._is_probed or self._apart is not None:
            return None
        self._is_probed = True
        return OverflowProbe() if any(map(may_overflow, self._parts.values())) else None

    def probed(
        self,
        step: int,
        probe: OverflowProbe | None,
        result: _Result,
        compute: Callable[[], _Result],
    ) -> _Result:
        """The result of `compute`, which was finite, or a better one: see `of_swallowed`."""
        if probe is None or not probe.has_seen():
            return result
        search = RepairSearch(self._parts, self._repairs, compute, {})
        outcome = catch_out_of_memory(lambda: search.of_swallowed(result))
        if isinstance(outcome, OutOfMemory):
            self.note(f"{self._where(step)}: float16 overflowed; there is too little memory to "
                      "tell whether that changed the result")  # fmt: skip
            return compute()
        self._tell(self._event(step, each, is_swallowed=True) for each in outcome.repairs)
        assert outcome.result is not None
        return outcome.result

    def spared(
        self,
        step: int,
        compute: Callable[[], _Result],
        again: Callable[[], _Result] | None = None,
    ) -> _Result:
        """The result of `compute`, done in less memory if there is too little.

        `again` is called in its place then, if it is given. See `settings`.

        Raises:
            CannotRunError: there is too little for any way that is known.
        """
        if self._apart is None:
            return self._reliefs.spared(self._calls, step, compute, again)
        result = catch_out_of_memory(compute)
        if not isinstance(result, OutOfMemory):
            return result
        raise together(self._calls.stage, step, self._parts, self._where(step), result.said)

    def answered(self, step: int, seen: Range) -> None:
        """Note an answer of a denoiser that is far larger than any before."""
        if self._largest and seen.largest > _JUMP * self._largest:
            self.note(
                f"{self.place(step)}: the model's answer reaches {seen.largest:.3g}, and none "
                f"before went beyond {self._largest:.3g}"
            )
        self._largest = max(self._largest, seen.largest)

    def latents(self, step: int, latents: Tensor) -> None:
        """Look at a sampler's state.

        Raises:
            NumericsError: not finite although the denoiser's answers were.
        """
        if not value_range(latents).is_finite:
            raise NumericsError(
                f"{self._where(step)}: the sampler made latents that are not finite out of an "
                "answer that is; another sampler or another number of steps may not"
            )

    def decoded(
        self, step: int, compute: Callable[[], Tensor], latents: Tensor, *, is_asked: bool = False
    ) -> Tensor:
        """Pixels (T, ...) around -1..1 that are finite and, if it can be helped, not blank.

        See `not_blank`.
        """
        pixels = self.call(step, compute)
        return self.not_blank(step, pixels, compute, latents, is_asked=is_asked)

    def not_blank(
        self,
        step: int,
        result: _Result,
        compute: Callable[[], _Result],
        latents: Tensor,
        pixels_of: Callable[[Any], Tensor] = lambda result: result,
        *,
        is_asked: bool = False,
    ) -> _Result:
        """The result, which `compute` gave, or a better one; `pixels_of` it: frames (T, 3, H, W).

        Frames of one colour from latents that aren't are decoded again in float32. What stays blank
        is noted, unless the prompt asks for that colour or `is_asked` (a given frame is).
        """
        pixels = pixels_of(result)
        blank = blank_frames(pixels, -1, 1, _ONE_COLOUR)
        if not blank:
            return result
        seen = value_range(latents)
        if seen.low == seen.high:
            return result
        wide = self._repairs.widest()
        if wide:
            again = self._in_float32(wide, step, compute, pixels_of, len(blank))
            if again is not None:
                return again
        if is_asked or asks_for(self._plan.settings.prompt, pixels[blank] / 2 + 0.5):
            return result
        self.note(
            # Without how much memory there was, so that the same run has the same record.
            f"{self.place(step)}: {len(blank)} of {len(pixels)} frames are of one colour "
            "though their latents are not, in float32 too; they are written as they are",
            in_record=True,
        )
        return result

    def note(self, text: str, *, in_record: bool = False) -> None:
        """Something to be told, though nothing was changed; `in_record` for what is in frames."""
        self._calls.tell(Note(text, in_record, self._seed))

    def repaired(
        self,
        step: int,
        compute: Callable[[], _Result],
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> _Result:
        """The result of `compute`, which was not finite, with as little raised as helps.

        `given` is what is called with, by name.

        Raises:
            NumericsError: nothing helps. GivenError: what was given is not finite.
        """
        outcome = RepairSearch(self._parts, self._repairs, compute, given).until_finite()
        if outcome.result is None:
            raise self._beyond_repair(step, outcome.fault)
        if not outcome.repairs:
            self.note(f"{self._where(step)}: values were not finite, and are when repeated")
        self._tell(self._event(step, each) for each in outcome.repairs)
        return outcome.result

    def _tell(self, repaired: Iterable[Repaired]) -> None:
        """Hand on what was repaired, and keep with the video what it has now."""
        self._calls.tell(*repaired)
        if self._take is not None:
            others = [each for each in self._take.remedies if each.component not in self._parts]
            self._take.remedies = (*others, *self._repairs.all())

    def _beyond_repair(self, step: int, fault: Fault | None) -> NumericsError:
        where = self._where(step)
        if fault is None and bad_weights(self._parts):
            return NumericsError(f"{where}: {weights_told(self._parts, '')}")
        if fault is None:
            return NumericsError(
                f"{where}: {' and '.join(self._parts)} gave values that are not finite, which no "
                "operation makes when each is watched; report it with what this prints: "
                "everyframe doctor --share"
            )
        if fault.cause == "weights":
            return NumericsError(f"{where}: {weights_told(self._parts, fault.place)}")
        if fault.cause == "given":
            return GivenError(
                f"{self.place(step)}: {fault.part} was given {fault.operation} that is not finite, "
                "though all that its modules made was: the sampler's arithmetic or the pipeline's "
                "own did it. Nothing was written; other settings (steps, guidance), another "
                "scheduler or the whole pipeline in float32 may not"
            )
        return NumericsError(
            f"{where}: {describe_fault(fault, fault.cause)}. No wider precision helps, and "
            "nothing was written; other settings (size, guidance, steps) may not reach this"
        )

    def _event(self, step: int, done: RepairStep, *, is_swallowed: bool = False) -> Repaired:
        fault, remedy = done.fault, done.remedy
        # It went well in float32, so the formula is right.
        cause, why = ("range", "lost") if fault.cause == "formula" else (fault.cause, fault.cause)
        told = describe_fault(fault, why)
        told += ", which came to nothing later and changed the result" * is_swallowed
        text = f"{self._where(step)}: {told}. {remedy.place} runs in {remedy.to} from here on"
        dtype = dtype_name(fault.dtype)
        return Repaired(
            self._calls.stage, step, fault.part, fault.module, fault.operation, cause, dtype,
            remedy.module, remedy.to, text, self._seed,
        )  # fmt: skip

    @property
    def _seed(self) -> int | None:
        return None if self._take is None else self._take.seed

    def _in_float32(
        self,
        wide: Sequence[Repair],
        step: int,
        compute: Callable[[], _Result],
        pixels_of: Callable[[Any], Tensor],
        num_blank: int,
    ) -> _Result | None:
        """The result by whole components in float32, which stay so if fewer frames are blank."""
        for remedy in wide:
            self._repairs.put_on(remedy)
        result = compute()
        is_better = value_range(result).is_finite
        if not is_better or len(blank_frames(pixels_of(result), -1, 1, _ONE_COLOUR)) >= num_blank:
            for remedy in reversed(wide):
                self._repairs.take_off(remedy)
            return None
        names, dtype = [remedy.component for remedy in wide], wide[0].dtype
        text = (
            f"{self._where(step)}: {num_blank} frames were of one colour in {dtype} and are not in "
            f"float32; {' and '.join(names)} runs in float32 from here on"
        )
        self._tell(
            Repaired(self._calls.stage, step, name, "", "", "blank", dtype, "", "float32", text,
                     self._seed)
            for name in names
        )  # fmt: skip
        return result

    def place(self, step: int) -> str:
        """Such as "step 3 of denoise"."""
        return self._calls.place(step)

    def _where(self, step: int) -> str:
        return self._calls.where(step)
