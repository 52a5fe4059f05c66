"""The steps that a lossy method leaves out of a pipeline's call, while its error budget lasts."""

from __future__ import annotations

from collections.abc import Callable

from everyframe.core.events import Event, Note
from everyframe.core.quality import SamplingMethod
from everyframe.samplers.error_budget import ErrorBudget


class CallBudget:
    """The error budget of one video, by `method` in `num_steps`; `agree` is that of `ErrorBudget`.

    `emit` gets a note when the budget is spent, and the event of `close`.
    """

    def __init__(
        self,
        method: SamplingMethod,
        num_steps: int,
        agree: Callable[[bool], bool],
        seed: int,
        emit: Callable[[Event], None],
    ) -> None:
        self._computed, self._num_steps = frozenset(method.computed_steps(num_steps)), num_steps
        self._errors = ErrorBudget(method.limit, agree)
        self._seed, self._emit = seed, emit

    @property
    def is_spent(self) -> bool:
        """Whether the remaining steps are exact."""
        return self._errors.is_spent

    def leaves_out(self, step: int) -> bool:
        """Whether the step, counted from 0, is none of the computed ones."""
        return step < self._num_steps and step not in self._computed and not self.is_spent

    def add(self, estimate: float | None, step: int) -> None:
        """Add the error estimate of a computed step to a budget that is not spent."""
        self._errors = self._errors.plus(estimate)
        if self.is_spent:
            self._emit(Note(self._errors.note(step), in_record=True, seed=self._seed))

    def close(self) -> None:
        """Emit the estimated error of the whole video."""
        self._emit(self._errors.event(self._seed))
