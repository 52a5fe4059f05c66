"""Diff two traces: find the first difference that their precision does not explain.

Tensors are visited in order of time. A module's output is judged by the differences of its inputs;
an input by the differences seen before it in the surrounding code. A difference is *explained* if
it is at most `GROWTH` times the largest one before it, plus the rounding of the narrower dtype. So
a difference that grows from module to module is followed to its origin, and code between modules is
kept apart from the modules. Weights are compared too. `replay` tells growth from source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError
from everyframe.numerics.trace.fingerprint import difference, is_finite
from everyframe.numerics.trace.trace import Call, Trace, TracedTensor

#: Largest growth of a difference within one module. Between float32 and bfloat16 the most measured
#: is 2.2, in the modulation of the embedded model.
GROWTH = 8.0
#: A module's accumulated rounding, in units of the narrower dtype. One rounding of all elements is
#: 0.4 to 0.6 units (measured); a sum of 300 terms kept in float16 is 3.6.
ROUNDINGS = 2.0
#: Error of float32 sums in units of float32, for some thousand terms.
_SUM_ROUNDINGS = 64.0

_EXPONENT = {
    "float64": -53, "float32": -24, "tf32": -11, "float16": -11, "bfloat16": -8,
    "float8_e4m3fn": -4, "float8_e4m3fnuz": -4, "float8_e5m2": -3, "float8_e5m2fnuz": -3,
}  # fmt: skip


@dataclass(frozen=True)
class TracePlace:
    """A difference larger than precision explains.

    Attributes:
        seen: index in the first trace's `seen`.
        error: relative difference there.
        before: largest difference of what went into it.
        explained: difference that precision explains.
        dtype: the narrower dtype.
        is_between: it is a module's input, so the code around the module made the difference.
        message: the finding in a sentence.
    """

    seen: int
    error: float
    before: float
    explained: float
    dtype: str
    is_between: bool
    message: str


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two traces.

    Attributes:
        a: first trace.
        b: second trace.
        errors: relative difference of each tensor of the first; NaN if the second lacks it.
        partners: call of the second trace for each call of the first.
        places: differences that precision does not explain, in order.
        notes: remarks on the comparison itself.
    """

    a: Trace
    b: Trace
    errors: npt.NDArray[np.float64]
    partners: Mapping[int, int]
    places: tuple[TracePlace, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> float:
        """Largest difference of any module output."""
        given = [error for error, seen in zip(self.errors, self.a.seen, strict=True)
                 if seen.kind == "output" and not math.isnan(error)]  # fmt: skip
        return max(given, default=0.0)


def compare(a: Trace, b: Trace) -> Comparison:
    """Compare two traces of the same model, sizes, seed and steps.

    Raises `InputError` with the reason if they can't be aligned.
    """
    _check_same(a, b)
    partners = _partners(a, b)
    walk = _Walk(a, b, partners)
    errors = np.array([walk.step(place) for place in range(len(a.seen))], dtype=np.float64)
    if not len(errors) or np.isnan(errors).all():
        raise InputError("the two traces have no call in common")
    return Comparison(a, b, errors, partners, tuple(walk.places), tuple(_notes(a, b, partners)))


def rounding(unit: float) -> float:
    """Error explained by a module's own arithmetic, with results rounded by `unit`."""
    sums = 2.0 ** _EXPONENT["float32" if unit > 1e-12 else "float64"]
    return ROUNDINGS * unit + _SUM_ROUNDINGS * sums


def unit_of(dtype: str, trace: Trace) -> float:
    """Unit roundoff of a dtype in that run; 0 for integers, which are exact."""
    if dtype == "float32" and trace.about.get("float32 products") == "tf32":
        dtype = "tf32"
    exponent = _EXPONENT.get(dtype)
    return 0.0 if exponent is None else 2.0**exponent


class _Walk:
    """Walk through the first trace in order of time."""

    def __init__(self, a: Trace, b: Trace, partners: Mapping[int, int]) -> None:
        self._a, self._b, self._partners = a, b, partners
        self._of_b = {(each.call, each.kind, each.name): each for each in b.seen}
        self._orders = _Orders(a), _Orders(b)
        # By call (-1: outside of all): the largest difference so far, the narrowest dtype and its
        # unit.
        self._before: dict[int, float] = {}
        self._narrow: dict[int, tuple[float, str]] = {}
        self._weights: dict[int, float] = {}
        self.places: list[TracePlace] = []

    def step(self, place: int) -> float:
        """Relative difference of that tensor; NaN if the second trace has none."""
        seen = self._a.seen[place]
        made = self._a.calls[seen.call]
        other = self._other(place, seen)
        if other is None:
            return math.nan
        self._check_shape(seen, other)
        error = difference(self._a.numbers[seen.row], self._b.numbers[other.row])
        scope = made.parent if seen.kind == "input" else seen.call
        before = 0.0 if seen.kind == "weight" else self._known(scope)
        own = max((unit_of(seen.dtype, self._a), seen.dtype),
                  (unit_of(other.dtype, self._b), other.dtype))  # fmt: skip
        narrow = own if seen.kind == "weight" else max(own, self._narrow.get(scope, own))
        explained = GROWTH * before + rounding(narrow[0])
        if error > explained or (error == math.inf and before != math.inf):
            self.places.append(self._place(place, other, error, before, explained, narrow[1]))
        self._learn(seen, made, error, own)
        return error

    def _other(self, place: int, seen: TracedTensor) -> TracedTensor | None:
        """Find the same tensor in the second trace, by name or else by order.

        Names differ where another class stands in the module's place.
        """
        call = self._partners.get(seen.call, -1)
        named = self._of_b.get((call, seen.kind, seen.name))
        if named is not None or seen.kind == "weight":
            return named
        one = self._orders[0].of(seen.call, seen.kind)
        two = self._orders[1].of(call, seen.kind)
        return self._b.seen[two[one.index(place)]] if len(one) == len(two) else None

    def _known(self, scope: int) -> float:
        own = self._weights.get(self._a.calls[scope].part, 0.0) if scope >= 0 else 0.0
        return max(self._before.get(scope, 0.0), own)

    def _learn(self, seen: TracedTensor, made: Call, error: float, own: tuple[float, str]) -> None:
        call = seen.call
        self._narrow[call] = max(own, self._narrow.get(call, own))
        if seen.kind == "weight":
            self._weights[made.part] = max(error, self._weights.get(made.part, 0.0))
            return
        around = made.parent
        scopes = [call] if seen.kind == "input" else [around]
        if seen.kind == "input" and around < 0:
            scopes.append(around)  # what came from outside once may come again
        for scope in scopes:
            self._before[scope] = max(error, self._before.get(scope, 0.0))
        if seen.kind == "output":
            self._narrow[around] = max(self._narrow[call], self._narrow.get(around, own))

    def _check_shape(self, seen: TracedTensor, other: TracedTensor) -> None:
        if seen.shape != other.shape:
            raise InputError(
                f"two sizes: the {_label(seen)} of {self._a.place(seen.call)} is {seen.shape} in "
                f"the first trace and {other.shape} in the second; record both at one size"
            )

    def _place(
        self,
        place: int,
        other: TracedTensor,
        error: float,
        before: float,
        explained: float,
        dtype: str,
    ) -> TracePlace:
        seen = self._a.seen[place]
        where, thing = self._a.place(seen.call), _label(seen)
        first, second = (
            is_finite(trace.numbers[each.row])
            for trace, each in ((self._a, seen), (self._b, other))
        )
        if first != second:
            which = "first" if second else "second"
            differs = f"is not finite in the {which} trace"
        else:
            differs = f"differs by {error:.1e}; {dtype} explains {explained:.1e}"
        is_between = seen.kind == "input"
        if seen.kind == "weight":
            message = (
                f"the weights of {where}: {seen.name} {differs}: these are not the same weights"
            )
        elif not is_between:
            message = f"{where}: its {thing} {differs}, with {_given(before)}"
        elif self._a.calls[seen.call].parent < 0:
            message = (
                f"before any module: the {thing} that {where} was given {differs}, with "
                f"{_given(before)}"
            )
        else:
            parent = self._a.place(self._a.calls[seen.call].parent)
            message = (
                f"{parent}: the {thing} that it gives to {where} {differs}, with {_given(before)}: "
                "its own code, between its modules"
            )
        return TracePlace(place, error, before, explained, dtype, is_between, message)


class _Orders:
    """Tensors of each call, in order."""

    def __init__(self, trace: Trace) -> None:
        self._places: dict[tuple[int, str], list[int]] = {}
        for place, seen in enumerate(trace.seen):
            self._places.setdefault((seen.call, seen.kind), []).append(place)

    def of(self, call: int, kind: str) -> list[int]:
        return self._places.get((call, kind), [])


def _label(seen: TracedTensor) -> str:
    if seen.kind == "weight":
        return f"weight {seen.name}"
    return f"{seen.kind} {seen.name}".strip()


def _given(before: float) -> str:
    if before == 0:
        return "the same going in, to the bit"
    return f"{before:.1e} going in"


_Key = tuple[str, int, str, int]


def _partners(a: Trace, b: Trace) -> dict[int, int]:
    """Map each call of the first trace to the same call of the second."""
    of_b = {key: call for call, key in enumerate(_keys(b))}
    return {call: of_b[key] for call, key in enumerate(_keys(a)) if key in of_b}


def _keys(trace: Trace) -> Iterator[_Key]:
    """Identity of each call in any trace: the outermost module's and its own."""
    outermost: list[str] = []
    for call in trace.calls:
        name = trace.parts[call.part].name
        outermost.append(outermost[call.parent] if call.parent >= 0 else name)
        yield outermost[-1], call.number, name, call.nth


def _check_same(a: Trace, b: Trace) -> None:
    """Raise `InputError` for traces of two different requests."""
    for key in {**a.same, **b.same}:
        one, two = a.same.get(key, "nothing"), b.same.get(key, "nothing")
        if one != two:
            kind = "two sizes" if key in ("size", "frames") else "not the same run"
            raise InputError(
                f"{kind}: {key} is {_short(one)} in the first trace and {_short(two)} in the "
                "second; record both with one request"
            )
    if a.ended or b.ended:
        return
    counts = _outermost(a), _outermost(b)
    for name in {**counts[0], **counts[1]}:
        first, second = (count.get(name, 0) for count in counts)
        if first != second:
            raise InputError(
                f"not the same run: {name} was called {first} times in the first trace and "
                f"{second} times in the second; record both with the same steps"
            )


def _outermost(trace: Trace) -> dict[str, int]:
    """Number of calls of each module made outside of any module."""
    counts: dict[str, int] = {}
    for call in trace.calls:
        if call.parent < 0:
            name = trace.parts[call.part].name
            counts[name] = counts.get(name, 0) + 1
    return counts


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def _notes(a: Trace, b: Trace, partners: Mapping[int, int]) -> Iterator[str]:
    """Yield remarks on the comparison itself."""
    for which, trace in (("first", a), ("second", b)):
        if trace.ended:
            yield f"the {which} run ended early: {trace.ended}"
    alone = [call for call in range(len(a.calls)) if call not in partners]
    lone = len(a.calls) + len(b.calls) - 2 * len(partners)
    if lone and not (a.ended or b.ended):
        example = f", such as {a.place(alone[0])}" if alone else ""
        yield f"{lone} calls are in one of the two traces alone{example}; the rest was compared"
    kinds = [{part.name: part.kind for part in trace.parts} for trace in (a, b)]
    others = [name for name in kinds[0] if kinds[1].get(name, kinds[0][name]) != kinds[0][name]]
    if others:
        one, two = (kind[others[0]] for kind in kinds)
        yield f"{others[0]} was {one} in the first run and {two} in the second"
