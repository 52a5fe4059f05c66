"""Benchmark a fast path against plain torch: error first, then time, in alternating runs.

The error budget follows flash-attention's own tests: at most twice the error of the plain formula
in the same precision, plus a floor of 1e-5 for float32, where that error is zero. An error is the
norm of the difference to float32, over float32's norm. A path that claims to be exact is compared
with plain torch and may not differ in any bit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everyframe.hardware.throughput import wait_for_device
from everyframe.precision.cast_hooks import tensors_in

#: Error budget: this multiple of the plain formula's error in the same precision, plus the floor.
TIMES_PLAIN, FLOOR = 2.0, 1e-5

#: Fewest and most timing rounds, and the seconds after which only the fewest are run.
_FEWEST, _MOST, _ENOUGH = 3, 15, 0.3


class OutOfTimeError(Exception):
    """The deadline passed before there was a result."""


@dataclass(frozen=True)
class Comparison:
    """One computation in several implementations, equal up to rounding.

    Attributes:
        name: for messages.
        truth: computes in float32.
        plain: the implementation that runs without the fast path.
        fast: the fast path.
        yardstick: the plain formula in the same precision, where `plain` is wider than that.
        allowed: overrides the error budget, where there is no such formula.
        weight: how often the computation occurs in a run; 0 measures the error alone.
    """

    name: str
    truth: Callable[[], Any]
    plain: Callable[[], Any]
    fast: Callable[[], Any]
    yardstick: Callable[[], Any] | None = None
    allowed: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class ComparisonResult:
    """Largest error relative to its budget, and the total speedup.

    Attributes:
        error: error of the comparison `worst`.
        limit: its budget.
        gain: time of plain torch over time of the fast path.
        worst: name of the comparison nearest to, or over, its budget.
    """

    error: float
    limit: float
    gain: float
    worst: str

    @property
    def is_right(self) -> bool:
        """Whether every error is within its budget."""
        return self.error <= self.limit


def run_comparisons(
    contests: Iterable[Comparison], device: str, deadline: float, *, is_exact: bool = False
) -> ComparisonResult:
    """Run all comparisons, and stop at the first whose error exceeds its budget.

    With `is_exact` the error is measured against plain torch and must be zero.

    Raises:
        OutOfTimeError: `deadline`, on the monotonic clock, passed before the last one.
        ValueError: there is no comparison.
    """
    worst: ComparisonResult | None = None
    plain = fast = 0.0
    for contest in contests:
        error, limit = _error(contest, is_exact=is_exact)
        outcome = ComparisonResult(error, limit, 0.0, contest.name)
        if worst is None or not error * worst.limit <= worst.error * limit:
            worst = outcome
        if not outcome.is_right:
            return outcome
        if contest.weight:
            times = _times(contest, device, deadline)
            plain += contest.weight * times[0]
            fast += contest.weight * times[1]
        if time.monotonic() > deadline:
            raise OutOfTimeError
    if worst is None:
        raise ValueError("this model has nothing that it could be tried on")
    return ComparisonResult(
        worst.error, worst.limit, plain / fast if fast else math.inf, worst.worst
    )


def _error(contest: Comparison, *, is_exact: bool) -> tuple[float, float]:
    """Error of the fast path, and its budget."""
    if is_exact:
        return relative_error(contest.fast(), contest.plain()), 0.0
    truth = contest.truth()
    error = relative_error(contest.fast(), truth)
    if contest.allowed is not None:
        return error, contest.allowed
    yardstick = contest.yardstick or contest.plain
    return error, TIMES_PLAIN * relative_error(yardstick(), truth) + FLOOR


def _times(contest: Comparison, device: str, deadline: float) -> tuple[float, float]:
    """Median seconds of plain torch and the fast path, in alternating runs.

    Other load on the machine slows both.
    """
    plain: list[float] = []
    fast: list[float] = []
    while len(plain) < _FEWEST or (len(plain) < _MOST and sum(plain) + sum(fast) < _ENOUGH):
        if time.monotonic() > deadline:
            raise OutOfTimeError
        plain.append(measure_seconds(contest.plain, device))
        fast.append(measure_seconds(contest.fast, device))
    return statistics.median(plain), statistics.median(fast)


def measure_seconds(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call, until the device has computed it."""
    wait_for_device(device)
    began = time.perf_counter()
    run()
    wait_for_device(device)
    return time.perf_counter() - began


def relative_error(got: Any, want: Any) -> float:
    """Norm of the difference over the norm of `want`, over all tensors; NaN if any value is NaN.

    Infinite if the shapes differ.
    """
    ours, theirs = _floats(got), _floats(want)
    if [each.shape for each in ours] != [each.shape for each in theirs] or not ours:
        return math.inf
    off = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(ours, theirs, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in theirs)
    return math.sqrt(off / size) if size > 0 else (math.inf if off else 0.0)


def _floats(value: Any) -> list[Tensor]:
    return [each.detach().cpu() for each in tensors_in(value) if each.is_floating_point()]
