"""Search for the repairs that make a result finite, or restore what an overflow changed.

The call is replayed to locate the fault that its result comes from, and the module around it is
raised to the next wider dtype; this repeats until the result is finite. If no wider dtype is left
for a module, whole components are tried in float32. Repairs that do not help are undone. The search
emits no events and raises no error for a fault; `guard.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Generic, TypeVar

from torch import nn

from everyframe.core.plan import PLAIN, Repair
from everyframe.fast_paths.compilation.module_compilation import find_wrong_graphs
from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.numerics.fault import Fault
from everyframe.numerics.fault_locator import Located, locate_fault
from everyframe.numerics.tensor_stats import Range, iter_tensors, value_range
from everyframe.runtime.repair.rank_agreement import RankAgreement
from everyframe.runtime.repair.repairs import RepairSet

_Result = TypeVar("_Result")

#: Maximum number of modules raised one by one in a call; then the whole component is raised.
_MAX_RAISED = 24
#: Number of searches for modules that overflow after others were raised.
_ROUNDS = 4
#: Results differ above this share of the largest value; float16 rounding stays below.
_FAR = 0.02


@dataclass(frozen=True)
class RepairStep:
    """A fault and its repair."""

    fault: Fault
    repair: Repair

    def is_vain(self, next_fault: Fault) -> bool:
        """Whether the same module failed again although it uses plain kernels."""
        same = (next_fault.part, next_fault.module) == (self.fault.part, self.fault.module)
        return same and self.repair.to == PLAIN


@dataclass(frozen=True)
class RepairOutcome(Generic[_Result]):
    """The call's last result and the repairs that are active now.

    If nothing helped there is neither, and `fault` is the cause, if it is a single operation.
    """

    result: _Result | None
    repairs: tuple[RepairStep, ...] = ()
    fault: Fault | None = None


class RepairSearch(Generic[_Result]):
    """Find the repairs that `compute`, which calls the components `parts`, needs.

    `given` are its inputs by name; a non-finite input is no module's fault. All of `ranks` search
    for the same result, and find the same repairs.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        repairs: RepairSet,
        compute: Callable[[], _Result],
        given: Mapping[str, Any],
        ranks: RankAgreement | None = None,
    ) -> None:
        self._parts, self._repairs, self._compute, self._given = parts, repairs, compute, given
        self._ranks = ranks or RankAgreement()
        self._before = len(repairs.all())
        self._done: list[RepairStep] = []

    def until_finite(self) -> RepairOutcome[_Result]:
        """Repair a non-finite result with as few modules raised as possible.

        An out-of-memory error, of a replay or of wider weights, leaves no repair of the search.
        """
        try:
            return self._until_finite()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._repairs.take_back(self._before)
            raise

    def _until_finite(self) -> RepairOutcome[_Result]:
        while True:
            located = self._locate()
            if located is None:
                continue
            if located.fault is None:
                break
            found = self._repair_of(located)
            if found is None:
                return self._by_whole_components(located.fault)
            self._apply(found)
        result = self._compute()
        if not self._is_finite(result):
            # Watched operations ran uncompiled, so the compiled code is left as the cause.
            for fault in self._ranks.faults(find_wrong_graphs(self._parts, self._compute)):
                self._apply(RepairStep(fault, self._repairs.plainly(fault.part, fault.module)))
            result = self._compute()
        if not self._is_finite(result):
            self._repairs.take_back(self._before)
            return RepairOutcome(None)
        return RepairOutcome(result, tuple(self._done))

    def of_swallowed(self, result: _Result) -> RepairOutcome[_Result]:
        """Repair a finite result whose infinities vanished on the way, if the result changes.

        An infinity that changes nothing, such as that of a mask, stays.
        """
        repaired: _Result | None = None
        try:
            if not self._raise_swallowed():
                return RepairOutcome(result)
            repaired = self._compute()
        except (RuntimeError, MemoryError) as error:
            # The upcast caused a dtype clash, which must not end a run.
            if is_device_loss(error) or is_out_of_memory(error):
                self._repairs.take_back(self._before)
                raise
        if repaired is not None and value_range(repaired).is_finite and _is_far(result, repaired):
            return RepairOutcome(repaired, tuple(self._done))
        self._repairs.take_back(self._before)
        # Recomputed, as a call may keep state that the removed repairs changed.
        return RepairOutcome(self._compute())

    def _raise_swallowed(self) -> bool:
        """Raise the modules whose infinities vanished later; return whether there are any.

        In float16 the next module may overflow on what they pass on, so the search repeats.
        """
        for _ in range(_ROUNDS):
            located = locate_fault(self._parts, self._compute, self._given)
            found = {
                (fault.part, fault.module): fault
                for fault in (*located.swallowed, *located.faults)
                if fault.cause in ("range", "kernel")
            }
            whole, before = len(found) > _MAX_RAISED, len(self._done)
            for fault in found.values():
                repair = self._repairs.for_fault(fault, whole=whole)
                if repair is not None:
                    self._apply(RepairStep(fault, repair))
            if len(self._done) == before:
                break
        return bool(self._done)

    def _locate(self) -> Located | None:
        """Locate the faults under the current repairs.

        None after a dtype mismatch: then the parent of the last repaired module is raised, too.
        """
        try:
            own = locate_fault(self._parts, self._compute, self._given)
        except RuntimeError as raised:
            if is_out_of_memory(raised) or is_device_loss(raised):
                raise
            own = Located((), error=raised)
        located = self._ranks.located(own)
        if located.error is None or self._repair_of(located) is not None:
            return located
        if not self._done:
            raise located.error
        last = self._done.pop()
        around = self._repairs.around(last.repair)
        if around is None:
            raise located.error
        self._apply(RepairStep(last.fault, around))
        return None

    def _repair_of(self, located: Located) -> RepairStep | None:
        """Smallest repair to try next for what the result comes from."""
        if any(each.cause == "weights" for each in located.faults):
            return None
        if self._done and located.fault is not None and self._done[-1].is_vain(located.fault):
            self._repairs.remove(self._done.pop().repair)
        return self._first(located.faults)

    def _first(self, faults: Iterable[Fault]) -> RepairStep | None:
        """The first of these faults that has a repair."""
        whole = len(self._done) >= _MAX_RAISED
        for fault in faults:
            repair = self._repairs.for_fault(fault, whole=whole)
            if repair is not None:
                return RepairStep(fault, repair)
        return None

    def _apply(self, step: RepairStep) -> None:
        self._repairs.apply(step.repair)
        self._done.append(step)

    def _is_finite(self, result: Any) -> bool:
        """Whether all ranks have a finite result; a rank that has none asks, too."""
        seen = Range(nan, nan) if result is None else value_range(result)
        return self._ranks.are_finite(seen)

    def _by_whole_components(self, fault: Fault) -> RepairOutcome[_Result]:
        """Last attempt, when nothing around a fault can be raised: whole components in float32.

        The module's input may have lost its precision long before.
        """
        self._repairs.take_back(self._before)
        whole = self._repairs.widest()
        if whole and fault.cause not in ("weights", "given"):
            for repair in whole:
                self._repairs.apply(repair)
            try:
                result: _Result | None = self._compute()
            except RuntimeError as error:
                if is_out_of_memory(error) or is_device_loss(error):
                    raise
                result = None  # two dtypes met
            if self._is_finite(result) and result is not None:
                return RepairOutcome(result, tuple(RepairStep(fault, repair) for repair in whole))
            self._repairs.take_back(self._before)
        return RepairOutcome(None, fault=fault)


def _is_far(result: Any, repaired: Any) -> bool:
    pairs = zip(iter_tensors(result), iter_tensors(repaired), strict=True)
    return any(
        float((a.float() - b.float()).abs().max()) > _FAR * float(b.float().abs().max())
        for a, b in pairs
    )
