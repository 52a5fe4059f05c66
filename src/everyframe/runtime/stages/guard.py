"""Numerics guard: detect non-finite results and repair them by raising precision.

Each component result is checked with one min/max reduction. On NaN or infinity the guard
  1. replays the call with the same inputs to find the operation that the result comes from,
  2. reruns the module around it in the next wider dtype or with plain kernels,
and repeats both until the result is finite or no repair is left (NumericsError with the place).
Stages yield its `events`. A run without faults computes exactly what it would without the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note, Repaired
from everyframe.core.plan import Plan, Repair, Settings
from everyframe.fast_paths.compilation.module_compilation import WrittenCalls
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory
from everyframe.numerics.fault import Fault
from everyframe.numerics.fault_locator import bad_weights, faults_of_inputs
from everyframe.numerics.overflow_probe import OverflowProbe, may_overflow
from everyframe.numerics.tensor_stats import Range, blank_frames, value_range
from everyframe.parallel.communicator import ONE, Communicator
from everyframe.precision.dtypes import dtype_name
from everyframe.runtime.interface import MemorySavings, VideoState
from everyframe.runtime.memory.oom_fallback import OomFallbacks, together
from everyframe.runtime.repair.rank_agreement import RankAgreement, UnshardedCall
from everyframe.runtime.repair.repair_search import RepairSearch, RepairStep
from everyframe.runtime.repair.repairs import (
    GuardLog,
    RepairSet,
    asks_for,
    bad_weights_message,
    describe_fault,
)

_Result = TypeVar("_Result")

#: A denoiser output this many times as large as any before is noted.
_JUMP = 100.0
#: Frames whose values (-1..1) differ by less than one of 255 steps are of one colour.
_ONE_COLOUR = 2 / 255


class GivenError(NumericsError):
    """The inputs of a component are not finite; its caller reports this as a NumericsError."""


class Guard:
    """Watch the components `parts`, by name, during one stage.

    `counts` and `of` name a call in messages, by default "step 3 of denoise". The ranks `group`
    have the same results and repair them alike. Where they compute them together, each locates a
    fault alone, inside ``unsharded()``. With `keeps_storage`, `end` restores the storage of the
    weights too. `free_others` is that of `OomFallbacks`.
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
        unsharded: UnshardedCall | None = None,
        group: Communicator = ONE.video_group,
        keeps_storage: bool = False,
        free_others: Callable[[], bool] | None = None,
    ) -> None:
        self._plan, self.ranks = plan, RankAgreement(group, unsharded)
        self._parts = dict(parts)
        self._calls = GuardLog(plan.device, stage, counts, of or stage)
        self._repairs = RepairSet(plan.device, parts, keeps_storage=keeps_storage)
        self._fallbacks = OomFallbacks(plan, parts, savings, stage, free_others=free_others)
        self._video: VideoState | None = None
        self._written_calls = WrittenCalls({})
        self._largest = 0.0
        self._is_probed = False

    @property
    def settings(self) -> Settings:
        """The plan's settings plus the memory fallbacks applied so far."""
        return self._fallbacks.settings

    @property
    def has_repaired(self) -> bool:
        """Whether a repair is active for the current video."""
        return bool(self._repairs)

    def start_video(self, video: VideoState) -> None:
        """Switch to another video: undo the last video's repairs and apply this one's."""
        if video is self._video:
            return
        self._repairs.undo()
        for repair in video.repairs:
            if repair.component in self._parts:
                self._repairs.apply(repair)
        self._video, self._largest, self._is_probed = video, 0.0, False
        self._written_calls = WrittenCalls(self._parts)
        self._fallbacks.moments.of(video)

    def join(self) -> None:
        """Let the components accept inputs wider than their parameters, until `end`."""
        self._repairs.join()

    def end(self) -> None:
        """Undo every repair; the components are as before, bit for bit."""
        self._repairs.undo()

    def events(self) -> Iterator[Event]:
        """Repairs and notes since the last call."""
        for reason in self._written_calls.new_reasons():
            self.note(reason, in_record=True)
        return self._calls.events()

    def hear(self, events: Iterable[Event]) -> None:
        """Add the events of guards on other ranks to its own."""
        self._calls.add_events(*events)

    def call(self, step: int, compute: Callable[[], _Result]) -> _Result:
        """Return the result of `compute` with all floating tensors finite, repeating it if needed.

        `step` counts the stage's calls from 1.

        Raises:
            NumericsError: no wider precision helps; names step, module and operation.
        """
        probe = self.probe()
        with probe or nullcontext():
            result: _Result = self.with_fallbacks(step, compute)
        if not value_range(result).is_finite:
            repaired: _Result = self.with_fallbacks(step, lambda: self.repair(step, compute))
            return repaired
        return self.check_overflow(step, probe, result, compute)

    def probe(self) -> OverflowProbe | None:
        """Overflow probe for a video's first call of float16 components, to run that call inside.

        None for ranks that compute one result together: each sees its own share only.
        """
        if self._is_probed or self.ranks.is_shared:
            return None
        self._is_probed = True
        return OverflowProbe() if any(map(may_overflow, self._parts.values())) else None

    def check_overflow(
        self,
        step: int,
        probe: OverflowProbe | None,
        result: _Result,
        compute: Callable[[], _Result],
    ) -> _Result:
        """Return the finite result, or a repaired one; see `RepairSearch.of_swallowed`."""
        if probe is None or not probe.has_seen():
            return result
        search = RepairSearch(self._parts, self._repairs, compute, {})
        outcome = catch_out_of_memory(lambda: search.of_swallowed(result))
        if isinstance(outcome, OutOfMemory):
            self.note(f"{self._where(step)}: float16 overflowed; there is too little memory to "
                      "check whether that changed the result")  # fmt: skip
            return compute()
        self._add_events(self._event(step, each, is_swallowed=True) for each in outcome.repairs)
        assert outcome.result is not None
        return outcome.result

    @property
    def with_fallbacks(self) -> Callable[..., Any]:
        """``with_fallbacks(step, compute, again=None)``: the result of `compute`.

        If memory runs out, `compute` is repeated with memory fallbacks, or `again` if it is given
        is called instead. See `settings`.

        Raises:
            CannotRunError: no known fallback frees enough memory.
        """
        if not self.ranks.is_shared:
            return partial(self._fallbacks.with_fallbacks, self._calls)
        return self._compute_once

    def _compute_once(
        self, step: int, compute: Callable[[], _Result], again: object = None
    ) -> _Result:
        """The result of `compute`, which other ranks wait for: this one can't repeat it alone."""
        result = catch_out_of_memory(compute)
        if not isinstance(result, OutOfMemory):
            return result
        raise together(self._calls.stage, step, self._parts, self._where(step), result.message)

    def note_output(self, step: int, seen: Range) -> None:
        """Note a denoiser output over 100 times as large as any before."""
        if self._largest and seen.largest > _JUMP * self._largest:
            self.note(
                f"{self.place(step)}: the model's answer reaches {seen.largest:.3g}, and none "
                f"before went beyond {self._largest:.3g}"
            )
        self._largest = max(self._largest, seen.largest)

    def latents(self, step: int, latents: Tensor) -> None:
        """Check a sampler's state.

        Raises:
            NumericsError: not finite although the denoiser's outputs were.
        """
        if not value_range(latents).is_finite:
            raise NumericsError(
                f"{self._where(step)}: the sampler made latents that are not finite out of an "
                "answer that is; another sampler or another number of steps may not"
            )

    def check_decoded(
        self, step: int, compute: Callable[[], Tensor], latents: Tensor, *, is_asked: bool = False
    ) -> Tensor:
        """Return finite pixels (T, ...) around -1..1, recomputed if blank; see `not_blank`."""
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
        """Return the `result` of `compute`, or a better one if its frames are blank.

        Frames of one colour from latents that vary are decoded again in float32. Frames that stay
        blank are noted, unless the prompt asks for that colour or `is_asked` (a conditioning frame
        has it). `pixels_of` gives the frames (T, 3, H, W) of a result.
        """
        pixels = pixels_of(result)
        blank = blank_frames(pixels, -1, 1, _ONE_COLOUR)
        if not blank:
            return result
        seen = value_range(latents)
        if seen.low == seen.high:
            return result
        wide = self._repairs.widest()
        again = self._in_float32(wide, step, compute, pixels_of, len(blank)) if wide else None
        if isinstance(again, OutOfMemory):
            self.note(f"{self.place(step)}: {len(blank)} of {len(pixels)} frames are of one colour "
                      "though their latents are not, and there is too little memory to decode "
                      "them in float32; they are written as they are")  # fmt: skip
            return result
        if again is not None:
            return again
        if is_asked or asks_for(self._plan.settings.prompt, pixels[blank] / 2 + 0.5):
            return result
        self.note(
            # Without the amount of memory, so that the same run has the same record.
            f"{self.place(step)}: {len(blank)} of {len(pixels)} frames are of one colour "
            "though their latents are not, in float32 too; they are written as they are",
            in_record=True,
        )
        return result

    def raise_decoder(self, step: int, why: str, *, is_lead: bool) -> None:
        """Run the decoder in float32 for this video; see `decoder_check`.

        Of several ranks all do so, and the lead rank reports it.
        """
        (repair,) = self._repairs.widest()
        self._repairs.apply(repair)
        text = f"{self.place(step)}: {why}; {repair.component} runs in float32 from here on"
        event = Repaired(self._calls.stage, step, repair.component, "decoder", "", "coarse",
                         repair.dtype, "", "float32", text, self._seed)  # fmt: skip
        self._add_events([event] if is_lead else [])

    def note(self, text: str, *, in_record: bool = False) -> None:
        """Add a note without a change; `in_record` if it concerns the frames."""
        self._calls.add_events(Note(text, in_record, self._seed))

    def repair(
        self,
        step: int,
        compute: Callable[[], _Result],
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> _Result:
        """Repair the non-finite result of `compute`, with as few modules raised as possible.

        `given` are the inputs by name.

        Raises:
            NumericsError: nothing helps. GivenError: an input is not finite.
        """
        search = RepairSearch(self._parts, self._repairs, compute, given, self.ranks)
        outcome = search.until_finite()
        if outcome.result is None:
            raise self._beyond_repair(step, outcome.fault)
        if not outcome.repairs:
            self.note(f"{self._where(step)}: values were not finite, and are when repeated")
        self._add_events(self._event(step, each) for each in outcome.repairs)
        return outcome.result

    def check_inputs(self, step: int, given: Mapping[str, Any]) -> None:
        """Raise GivenError if an input of a call, by name, is not finite; masks may be infinite."""
        for fault in faults_of_inputs(self._parts, given).values():
            if not fault.is_planned:
                raise self._beyond_repair(step, fault)

    def _add_events(self, repaired: Iterable[Repaired]) -> None:
        """Emit repair events and save the active repairs with the video."""
        self._calls.add_events(*repaired)
        if self._video is not None:
            others = [each for each in self._video.repairs if each.component not in self._parts]
            self._video.repairs = (*others, *self._repairs.all())

    def _beyond_repair(self, step: int, fault: Fault | None) -> NumericsError:
        where = self._where(step) + self.ranks.culprit
        has_bad_weights = bad_weights(self._parts) if fault is None else fault.cause == "weights"
        if has_bad_weights:
            place = "" if fault is None else fault.place
            message = bad_weights_message(self._parts, place, is_shared=self.ranks.is_shared)
            return NumericsError(f"{where}: {message}")
        if fault is None:
            return NumericsError(
                f"{where}: {' and '.join(self._parts)} gave values that are not finite, which no "
                "operation makes when each is watched; report it with what this prints: "
                "everyframe doctor --share"
            )
        if fault.cause == "given":
            return GivenError(
                f"{self.place(step)}: {fault.part} was given {fault.operation} that is not finite, "
                "though all module results were: it comes from the arithmetic of the sampler or "
                "the pipeline. Nothing was written; try other settings (steps, guidance), another "
                "scheduler or the whole pipeline in float32"
            )
        return NumericsError(
            f"{where}: {describe_fault(fault, fault.cause)}. No wider precision helps, and "
            "nothing was written; try other settings (size, guidance, steps)"
        )

    def _event(self, step: int, done: RepairStep, *, is_swallowed: bool = False) -> Repaired:
        fault, repair = done.fault, done.repair
        # It is right in float32, so the formula is.
        cause, why = ("range", "lost") if fault.cause == "formula" else (fault.cause, fault.cause)
        problem = describe_fault(fault, why)
        problem += ", which became finite later and changed the result" * is_swallowed
        where = self._where(step) + self.ranks.culprit
        text = f"{where}: {problem}. {repair.place} runs in {repair.to} from here on"
        dtype = dtype_name(fault.dtype)
        return Repaired(
            self._calls.stage, step, fault.part, fault.module, fault.operation, cause, dtype,
            repair.module, repair.to, text, self._seed,
        )  # fmt: skip

    @property
    def _seed(self) -> int | None:
        return None if self._video is None else self._video.seed

    def _in_float32(
        self,
        wide: Sequence[Repair],
        step: int,
        compute: Callable[[], _Result],
        pixels_of: Callable[[Any], Tensor],
        num_blank: int,
    ) -> _Result | OutOfMemory | None:
        """Recompute with whole components in float32; stays so if fewer frames are blank."""
        before = len(self._repairs.all())

        def recompute() -> _Result:
            for repair in wide:
                self._repairs.apply(repair)
            return compute()

        # Other ranks wait for this one, so it can't continue alone.
        result = recompute() if self.ranks.is_shared else catch_out_of_memory(recompute)
        is_done = not isinstance(result, OutOfMemory) and value_range(result).is_finite
        if not is_done or len(blank_frames(pixels_of(result), -1, 1, _ONE_COLOUR)) >= num_blank:
            self._repairs.take_back(before)
            return result if isinstance(result, OutOfMemory) else None
        names, dtype = [repair.component for repair in wide], wide[0].dtype
        text = (
            f"{self._where(step)}: {num_blank} frames were of one colour in {dtype} and are not in "
            f"float32; {' and '.join(names)} runs in float32 from here on"
        )
        self._add_events(
            Repaired(self._calls.stage, step, name, "", "", "blank", dtype, "", "float32", text,
                     self._seed)
            for name in names
        )  # fmt: skip
        return result

    def place(self, step: int) -> str:
        """Name of a call, such as "step 3 of denoise"."""
        return self._calls.place(step)

    def _where(self, step: int) -> str:
        return self._calls.where(step)
