"""The search for repairs that make a call's result finite, or that bring back what it lost.

The call is repeated, the fault that its result comes of is found, and the module around it is
raised by one rung of precision; so on until the result is finite. Where no rung is left for a
module, whole components are tried in float32. What does not help is taken off again. Here nothing
is told and no error is raised for a fault. Read next: `guarding.py`, `everyframe.numerics.locate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from everyframe.core.plan import PLAIN, Remedy
from everyframe.families.repairing import Repairs
from everyframe.hardware.lost import is_lost
from everyframe.hardware.peak import is_out_of_memory
from everyframe.numerics.locate import Fault, Located, locate
from everyframe.numerics.watch import range_of, tensors_in
from everyframe.optimize.compiling import wrong_graphs

_Result = TypeVar("_Result")

#: So many modules of one call are raised one by one; then the whole component is.
_MAX_RAISED = 24
#: What overflows after what was raised is looked for so often.
_ROUNDS = 4
#: A result is another one beyond this share of its largest value; rounding in float16 is below.
_FAR = 0.02


@dataclass(frozen=True)
class Repair:
    """A fault, and what was done about it."""

    fault: Fault
    remedy: Remedy

    def is_vain(self, next_fault: Fault) -> bool:
        """Whether the same went wrong again although other kernels compute it."""
        same = (next_fault.part, next_fault.module) == (self.fault.part, self.fault.module)
        return same and self.remedy.to == PLAIN


@dataclass(frozen=True)
class Outcome(Generic[_Result]):
    """The call's last result, and the repairs that are put on now.

    Where nothing helped there is neither, and `fault` is why, if any operation is.
    """

    result: _Result | None
    repairs: tuple[Repair, ...] = ()
    fault: Fault | None = None


class RepairSearch(Generic[_Result]):
    """Finds what has to be put on for `compute`, which calls the components `parts`.

    `given` is what it is called with, by name; what of that is not finite is no module's fault.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        repairs: Repairs,
        compute: Callable[[], _Result],
        given: Mapping[str, Any],
    ) -> None:
        self._parts, self._repairs, self._compute, self._given = parts, repairs, compute, given
        self._before = len(repairs.all())
        self._done: list[Repair] = []

    def until_finite(self) -> Outcome[_Result]:
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
        if not range_of(result).is_finite:
            # With each operation watched, blocks ran as they are written: what is compiled is left.
            for fault in wrong_graphs(self._parts, self._compute):
                self._put_on(Repair(fault, self._repairs.plainly(fault.part, fault.module)))
            result = self._compute()
        if not range_of(result).is_finite:
            self._repairs.take_back(self._before)
            return Outcome(None)
        return Outcome(result, tuple(self._done))

    def of_swallowed(self, result: _Result) -> Outcome[_Result]:
        """Repair a finite result in which infinities came to nothing, if it is another one then.

        An infinity that changes nothing, as a mask's, is let be.
        """
        repaired: _Result | None = None
        try:
            if not self._raise_swallowed():
                return Outcome(result)
            repaired = self._compute()
        except RuntimeError as error:
            # Two dtypes met beside what was raised, which is no reason to end a run.
            if is_lost(error) or is_out_of_memory(error):
                self._repairs.take_back(self._before)
                raise
        if repaired is not None and range_of(repaired).is_finite and _is_far(result, repaired):
            return Outcome(repaired, tuple(self._done))
        self._repairs.take_back(self._before)
        # What a call keeps of its inputs was made with what is taken off now.
        return Outcome(self._compute())

    def _raise_swallowed(self) -> bool:
        """Raise what makes infinities that come to nothing; whether there is any.

        What they are handed on to in float16 overflows next, so it is looked for again.
        """
        for _ in range(_ROUNDS):
            located = locate(self._parts, self._compute, self._given)
            found = {
                (fault.part, fault.module): fault
                for fault in (*located.swallowed, *located.faults)
                if fault.cause in ("range", "kernel")
            }
            whole, before = len(found) > _MAX_RAISED, len(self._done)
            for fault in found.values():
                remedy = self._repairs.for_fault(fault, whole=whole)
                if remedy is not None:
                    self._put_on(Repair(fault, remedy))
            if len(self._done) == before:
                break
        return bool(self._done)

    def _located(self) -> Located | None:
        """The faults of the call as it is repaired by now; None: two dtypes met, and it is put on
        what is around the last one as well.
        """
        try:
            located = locate(self._parts, self._compute, self._given)
            if located.error is None or self._repair_of(located) is not None:
                return located
            error: Exception = located.error
        except RuntimeError as raised:
            if is_out_of_memory(raised) or is_lost(raised):
                raise
            error = raised
        if not self._done:
            raise error
        last = self._done.pop()
        around = self._repairs.around(last.remedy)
        if around is None:
            raise error
        self._put_on(Repair(last.fault, around))
        return None

    def _repair_of(self, located: Located) -> Repair | None:
        """The least that may help against what the result comes of."""
        if any(each.cause == "weights" for each in located.faults):
            return None
        if self._done and located.fault is not None and self._done[-1].is_vain(located.fault):
            self._repairs.take_off(self._done.pop().remedy)
        return self._first(located.faults)

    def _first(self, faults: Iterable[Fault]) -> Repair | None:
        """The first of these for which there is a remedy."""
        whole = len(self._done) >= _MAX_RAISED
        for fault in faults:
            remedy = self._repairs.for_fault(fault, whole=whole)
            if remedy is not None:
                return Repair(fault, remedy)
        return None

    def _put_on(self, repair: Repair) -> None:
        self._repairs.put_on(repair.remedy)
        self._done.append(repair)

    def _by_whole_components(self, fault: Fault) -> Outcome[_Result]:
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
                if is_out_of_memory(error) or is_lost(error):
                    raise
                result = None  # two dtypes met
            if result is not None and range_of(result).is_finite:
                return Outcome(result, tuple(Repair(fault, remedy) for remedy in whole))
            self._repairs.take_back(self._before)
        return Outcome(None, fault=fault)


def _is_far(result: Any, repaired: Any) -> bool:
    pairs = zip(tensors_in(result), tensors_in(repaired), strict=True)
    return any(
        float((a.float() - b.float()).abs().max()) > _FAR * float(b.float().abs().max())
        for a, b in pairs
    )
