"""A fast path against the plain way: error first, then time, by turns.

The budget is that of flash-attention's own tests: at most twice the error that the plain formula
has in the same precision, and a floor of 1e-5 for float32, where that is zero. An error is the norm
of the difference to float32, over float32's norm. What calls itself exact is held against the plain
way instead, and may differ in no bit. Read next: `trials`, which makes contests.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyframe.precision.cast_hooks import map_tensors

#: So many times the plain formula's error in the same precision is allowed, and so much besides.
TIMES_PLAIN, FLOOR = 2.0, 1e-5

#: Rounds of a contest, and the seconds after which there are no more than the fewest.
_FEWEST, _MOST, _ENOUGH = 3, 15, 0.3


class OutOfTimeError(Exception):
    """The time was over before there was an answer."""


@dataclass(frozen=True)
class Comparison:
    """One thing computed in several ways; all give the same tensors but for rounding.

    `truth` computes in float32, `plain` is the way that runs where the path is not used, `fast` the
    path. `yardstick` is the plain formula in the same precision where `plain` is wider than that.
    `allowed` overrules the budget, where there is no such formula. `weight` is how often it happens
    in a run; 0 is for the error alone.
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
    """The largest error for its limit, of the contest `worst`, and the gain in all."""

    error: float
    limit: float
    gain: float
    worst: str

    @property
    def is_right(self) -> bool:
        """Whether every error is inside its budget."""
        return self.error <= self.limit


def run_comparisons(
    contests: Iterable[Comparison], device: str, deadline: float, *, is_exact: bool = False
) -> ComparisonResult:
    """Hold all contests, and stop at the first whose error is over its budget.

    With `is_exact` an error is that to the plain way, and none is allowed.

    Raises:
        OutOfTimeError: `deadline`, on the monotonic clock, was over before the last one.
        ValueError: there is no contest.
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
    """The error of the fast way, and what it may be."""
    if is_exact:
        return relative_error(contest.fast(), contest.plain()), 0.0
    truth = contest.truth()
    error = relative_error(contest.fast(), truth)
    if contest.allowed is not None:
        return error, contest.allowed
    yardstick = contest.yardstick or contest.plain
    return error, TIMES_PLAIN * relative_error(yardstick(), truth) + FLOOR


def _times(contest: Comparison, device: str, deadline: float) -> tuple[float, float]:
    """Median seconds of the plain and the fast way; whatever else runs slows both."""
    plain: list[float] = []
    fast: list[float] = []
    while len(plain) < _FEWEST or (len(plain) < _MOST and sum(plain) + sum(fast) < _ENOUGH):
        if time.monotonic() > deadline:
            raise OutOfTimeError
        plain.append(_seconds(contest.plain, device))
        fast.append(_seconds(contest.fast, device))
    return statistics.median(plain), statistics.median(fast)


def _seconds(run: Callable[[], Any], device: str) -> float:
    _finished(device)
    began = time.perf_counter()
    run()
    _finished(device)
    return time.perf_counter() - began


def _finished(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of `want`, of all tensors in each; NaN if any is.

    Infinite where the shapes differ.
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
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor.detach().cpu())
        return tensor

    map_tensors(value, note)
    return found
