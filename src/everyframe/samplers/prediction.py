"""Predict a denoiser's outputs in some of a sampler's steps, by extrapolating computed outputs.

It wraps ``denoise(x, t)``, so the sampler runs unchanged on computed or predicted outputs. Outputs
are extrapolated over timesteps by a polynomial through the last two (``taylor1``) or three
(``taylor2``) computed ones; Liu et al. 2025 (arXiv 2503.06923) do so with features of blocks. With
Euler steps, the line over noise levels is also the predictor of ``abm2``;
`everyframe.diffusers_pipelines.lossy.euler_correction` has its corrector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everyframe.core.quality import SamplingMethod
from everyframe.ops.dtypes import upcast_to_widest
from everyframe.samplers.base import Denoise
from everyframe.samplers.error_budget import ErrorBudget

_ORDERS = {"taylor1": 1, "taylor2": 2, "abm2": 1}


class AnswerHistory:
    """The last computed answers of one denoiser with their times, and what they predict."""

    def __init__(self, method: SamplingMethod) -> None:
        self._num = _ORDERS[method.name] + 1
        self.times: tuple[float, ...] = ()
        self.answers: tuple[Tensor, ...] = ()

    def add(self, time: float, answer: Tensor) -> None:
        """Add a computed answer. One at the time of the last replaces it."""
        before = len(self.times) - (self.times[-1:] == (time,))
        self.times = (*self.times[:before], time)[-self._num :]
        self.answers = (*self.answers[:before], answer)[-self._num :]

    def predict(self, time: float, dtype: torch.dtype | None = None) -> Tensor:
        """The answer at that time; with one computed answer, that one. Needs one.

        It has the dtype of the answers by default.
        """
        weights = lagrange_weights(self.times, time)
        wide = torch.promote_types(self.answers[-1].dtype, torch.float32)
        terms = (w * a.to(wide) for w, a in zip(weights, self.answers, strict=True))
        total = sum(terms, start=torch.zeros((), dtype=wide))
        return total.to(dtype or self.answers[-1].dtype)

    def step_estimate(self, time: float, answer: Tensor) -> float | None:
        """Error of a prediction of this answer, relative to it, times the share of the time.

        None before two answers.
        """
        if len(self.times) < 2 or time == self.times[-1]:
            return None
        exact = upcast_to_widest(answer)
        difference = (exact - upcast_to_widest(self.predict(time))).norm()
        longest = max(abs(self.times[0]), abs(self.times[-1]), abs(time))
        share = abs(time - self.times[-1]) / longest
        return float(difference / exact.norm()) * share


def lagrange_weights(times: Sequence[float], time: float) -> list[float]:
    """Weights of values at `times` in the value at `time` of the polynomial through them."""
    weights = []
    for i, own in enumerate(times):
        weight = 1.0
        for j, other in enumerate(times):
            weight *= (time - other) / (own - other) if i != j else 1.0
        weights.append(weight)
    return weights


class PredictedDenoise:
    """``denoise(x, t)`` that computes some steps and predicts the others.

    `step` is the index of the current step, which its caller advances. `memory` is its state after
    each step, to be saved and passed to a resumed one.
    """

    def __init__(
        self,
        denoise: Denoise,
        method: SamplingMethod,
        num_steps: int,
        *,
        start: int = 0,
        memory: Mapping[str, Any] | None = None,
        agree: Callable[[bool], bool] = bool,
        skipped: Callable[[Tensor], None] = lambda answer: None,
    ) -> None:
        self._denoise, self._skipped = denoise, skipped
        self._computed = frozenset(method.computed_steps(num_steps))
        self._history = AnswerHistory(method)
        self._budget = ErrorBudget(method.limit, agree)
        self.step, self._notes = start, list[str]()
        if memory is not None:
            self._history.times = tuple(memory["times"])
            self._history.answers = tuple(memory["answers"])
            self._budget = self._budget.at(memory["error"])

    def __call__(self, x: Tensor, t: Tensor, *more: Tensor) -> Tensor:
        """The answer to x (B, ...) at t (B,), computed or predicted; `more` is handed on."""
        time = float(t.flatten()[0])
        self._history.answers = tuple(each.to(x.device) for each in self._history.answers)
        if self.step not in self._computed and not self._budget.is_spent:
            answer = self._history.predict(time)
            self._skipped(answer)
            return answer
        answer = self._denoise(x, t, *more)
        if not self._budget.is_spent:
            self._check(time, answer)
        self._history.add(time, answer)
        return answer

    def _check(self, time: float, answer: Tensor) -> None:
        self._budget = self._budget.plus(self._history.step_estimate(time, answer))
        if self._budget.is_spent:
            self._notes.append(self._budget.note(self.step))

    @property
    def memory(self) -> dict[str, Any]:
        """State that a resumed run needs: one latent for each answer in use."""
        return {
            "times": list(self._history.times),
            "answers": list(self._history.answers),
            "error": self._budget.error,
        }

    def take_note(self) -> str | None:
        """The note of the current step, if it has one."""
        return self._notes.pop() if self._notes else None
