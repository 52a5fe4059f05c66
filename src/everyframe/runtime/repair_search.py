"""The search for repairs that make a call's result finite, or that bring back what it lost.

The call is repeated, the fault that its result comes of is found, and the module around it is
raised by one rung of precision; so on until the result is finite. Where no rung is left for a
module, whole components are tried in float32. What does not help is taken off again. Here nothing
is told and no error is raised for a fault. Read next: `guard.py`,
`everyframe.numerics.fault_locator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from everyframe.core.plan import PLAIN, Repair
from everyframe.fast_paths.compilation import find_wrong_graphs
from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.numerics.fault_locator import Fault, Located, locate_fault
from everyframe.numerics.tensor_stats import iter_tensors, value_range
from everyframe.runtime.repairs import RepairSet

_Result = TypeVar("_Result")

#: So many modules of one call are raised one by one; then the whole component is.
_MAX_RAISED = 24
#: What overflows after what was raised is looked for so often.
_ROUNDS = 4
#: A result is another one beyond this share of its largest value; rounding in float16 is below.
_FAR = 0.02


@dataclass(frozen=True)
class RepairStep:
    """A fault, and what was done about it."""

    fault: Fault
    remedy: Repair

    def is_vain(self, next_fault: Fault) -> bool:
        """Whether the same went wrong again although other kernels compute it."""
        same = (next_fault.part, next_fault.module) == (self.fault.part, self.fault.module)
        return same and self.remedy.to == PLAIN


@dataclass(frozen=True)
class RepairOutcome(Generic[_Result]):
    """The call's last result, and the repairs that are put on now.

    Where nothing helped there is neither, and `fault` is why, if any operation is.
    """

    result: _Result | None
    repairs: tuple[RepairStep, ...] = ()
    fault: Fault | None = None


class RepairSearch(Generic[_Result]):
    """Finds what has to be put on for `compute`, which calls the components `parts`.

    `given` is what it is called with, by name; what of that is not finite is no module's fault.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        repairs: RepairSet,
        compute: Callable[[], _Result],
        given: Mapping[str, Any],
    ) -> None:
        self._parts, self._repairs, self._compute, self._given = parts, repairs, compute, given
        self._before = len(repairs.all())
        self._done: list[RepairStep] = []

    def until_finite(self) -> RepairOutcome[_Result]:
        """Repair a result that was not finite, with as little raised as helps."""
        while True:
            located = self._located()
            if located is None:
                continue
            if located.fault is None:
                break
            found = self._repair_of(located)
            if found is None:
                return self._by_whole_components(located.fault)
            self._put_on(found)
        result = self._compute()
        if not value_range(result).is_finite:
            # With each operation watched, blocks ran as they are written: what is compiled is left.
            for fault in find_wrong_graphs(self._parts, self._compute):
                self._put_on(RepairStep(fault, self._repairs.plainly(fault.part, fault.module)))
            result = self._compute()
        if not value_range(result).is_finite:
            self._repairs.take_back(self._before)
            return RepairOutcome(None)
        return RepairOutcome(result, tuple(self._done))

    def of_swallowed(self, result: _Result) -> RepairOutcome[_Result]:
        """Repair a finite result in which infinities came to nothing, if it is another one then.

        An infinity that changes nothing, as a mask's, is let be.
        """
        repaired: _Result | None = None
        try:
            if not self._raise_swallowed():
                return RepairOutcome(result)
            repaired = self._compute()
        except RuntimeError as error:
            # Two dtypes met beside what was raised, which is no reason to end a run.
            if is_device_loss(error) or is_out_of_memory(error):
                self._repairs.take_back(self._before)
                raise
        if repaired is not None and value_range(repaired).is_finite and _is_far(result, repaired):
            return RepairOutcome(repaired, tuple(self._done))
        self._repairs.take_back(self._before)
        # What a call keeps of its inputs was made with what is taken off now.
        return RepairOutcome(self._compute())

    def _raise_swallowed(self) -> bool:
        """Raise what makes infinities that come to nothing; whether there is any.

        What they are handed on to in float16 overflows next, so it is looked for again.
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
                remedy = self._repairs.for_fault(fault, whole=whole)
                if remedy is not None:
                    self._put_on(RepairStep(fault, remedy))
            if len(self._done) == before:
                break
        return bool(self._done)

    def _located(self) -> Located | None:
        """The faults of the call as it is repaired by now; None: two dtypes met, and it is put on
        what is around the last one as well.
        """
        try:
            located = locate_fault(self._parts, self._compute, self._given)
            if located.error is None or self._repair_of(located) is not None:
                return located
            error: Exception = located.error
        except RuntimeError as raised:
            if is_out_of_memory(raised) or is_device_loss(raised):
                raise
            error = raised
        if not self._done:
            raise error
        last = self._done.pop()
        around = self._repairs.around(last.remedy)
        if around is None:
            raise error
        self._put_on(RepairStep(last.fault, around))
        return None

    def _repair_of(self, located: Located) -> RepairStep | None:
        """The least that may help against what the result comes of."""
        if any(each.cause == "weights" for each in located.faults):
            return None
        if self._done and located.fault is not None and self._done[-1].is_vain(located.fault):
            self._repairs.take_off(self._done.pop().remedy)
        return self._first(located.faults)

    def _first(self, faults: Iterable[Fault]) -> RepairStep | None:
        """The first of these for which there is a remedy."""
        whole = len(self._done) >= _MAX_RAISED
        for fault in faults:
            remedy = self._repairs.for_fault(fault, whole=whole)
            if remedy is not None:
                return RepairStep(fault, remedy)
        return None

    def _put_on(self, repair: RepairStep) -> None:
        self._repairs.put_on(repair.remedy)
        self._done.append(repair)

    def _by_whole_components(self, fault: Fault) -> RepairOutcome[_Result]:
        """The last try, where nothing is left to be raised around a fault: all of it in float32.

        What a module is given may have lost its digits long before.
        """
        self._repairs.take_back(self._before)
        whole = self._repairs.widest()
        if whole and fault.cause not in ("weights", "given"):
            for remedy in whole:
                self._repairs.put_on(remedy)
            try:
                result: _Result | None = self._compute()
            except RuntimeError as error:
                if is_out_of_memory(error) or is_device_loss(error):
                    raise
                result = None  # two dtypes met
            if result is not None and value_range(result).is_finite:
                return RepairOutcome(result, tuple(RepairStep(fault, remedy) for remedy in whole))
            self._repairs.take_back(self._before)
        return RepairOutcome(None, fault=fault)


def _is_far(result: Any, repaired: Any) -> bool:
    pairs = zip(iter_tensors(result), iter_tensors(repaired), strict=True)
    return any(
        float((a.float() - b.float()).abs().max()) > _FAR * float(b.float().abs().max())
        for a, b in pairs
    )
