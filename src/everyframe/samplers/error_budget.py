"""Online check of a lossy method: its accumulated error estimate against a calibrated limit.

In a computed step the method's own prediction is known as well. The difference of the two, times
the step's length and relative to the state, is an estimate of its error, as in an adaptive solver
with an embedded method. The sum over all steps is the video's estimate. Calibration measures its
size in videos that stay within their budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from everyframe.core.events import ErrorEstimated


@dataclass(frozen=True)
class ErrorBudget:
    """Sum of error estimates so far.

    Attributes:
        limit: largest sum; None for no limit.
        agree: what all ranks of a video take as true, given what this rank sees.
        error: the sum, negative once the limit was passed.
    """

    limit: float | None
    agree: Callable[[bool], bool] = bool
    error: float = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the limit was passed: the remaining steps are exact."""
        return self.error < 0

    def at(self, error: float) -> ErrorBudget:
        """The same budget with that sum, from a saved state."""
        return replace(self, error=error)

    def plus(self, estimate: float | None) -> ErrorBudget:
        """The budget after another estimate; None adds nothing. An error of NaN spends it."""
        if estimate is None or self.is_spent:
            return self
        total = self.error + estimate
        is_over = self.limit is not None and not total <= self.limit
        if self.limit is not None and self.agree(is_over):
            return self.at(-max(total, 1e-30) if math.isfinite(total) else -1e30)
        return self.at(total)

    def event(self, seed: int) -> ErrorEstimated:
        """The event at the end of a video."""
        return ErrorEstimated(seed, abs(self.error), self.limit, self.is_spent)

    def note(self, index: int) -> str:
        """Message about the step, counted from 0, at which the limit was passed."""
        return (
            f"step {index + 1}: the estimated error {-self.error:.2g} of the lossy steps passed "
            f"its calibrated limit {self.limit:.2g}; all steps from here are exact"
        )
