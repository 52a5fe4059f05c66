"""A lossy method for UNets: whole calls in some steps, shallow ones in the others.

It wraps ``denoise(x, t)``, like `everyframe.samplers.prediction`. The saved state is the input of
the last whole step, one latent: a resumed run recomputes that call for its features, which are a
hundred times as large, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from everyframe.core.quality import SamplingMethod
from everyframe.fast_paths.modules.deep_features import DeepFeatures
from everyframe.samplers.base import Denoise
from everyframe.samplers.error_budget import ErrorBudget


class DeepCachedDenoise:
    """``denoise(x, t)`` whose deep layers are computed in some steps.

    `step` is the index of the current step, which its caller advances. `memory` is its state after
    each step, to be saved and passed to a resumed one. ``repeat(x, t)`` is the same denoiser.
    The error estimate of a whole step is the relative change of the deep features since the one
    before, times the share of the time.
    """

    def __init__(
        self,
        denoise: Denoise,
        features: DeepFeatures,
        method: SamplingMethod,
        num_steps: int,
        *,
        repeat: Callable[[Tensor, Tensor], object],
        start: int = 0,
        memory: Mapping[str, Any] | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._denoise, self._features, self._repeat = denoise, features, repeat
        self._computed = frozenset(method.computed_steps(num_steps))
        self._budget = ErrorBudget(method.limit, agree)
        self.step, self._notes = start, list[str]()
        self._longest: float | None = None
        self._given: tuple[Tensor, Tensor] | None = None
        if memory is not None:
            self._budget = self._budget.at(memory["error"])
            self._longest = memory["longest"]
            is_guided = memory["step"] < method.guided_steps(num_steps)
            if is_guided == (start < method.guided_steps(num_steps)):
                self._given = (memory["x"], memory["t"])
            self._computed_last = int(memory["step"])

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The answer to x (B, ...) at t (B,), by a whole call or a shallow one."""
        features, given = self._features, self._given
        is_whole = self.step in self._computed or self._budget.is_spent or given is None
        if given is not None and not features.is_filled and not self._budget.is_spent:
            features.is_shallow = False
            self._repeat(*(each.to(x.device) for each in given))
        features.is_shallow = not is_whole
        answer = self._denoise(x, t)
        if is_whole:
            if not self._budget.is_spent:
                self._check(float(t.flatten()[0]))
            self._given, self._computed_last = (x, t), self.step
        return answer

    def _check(self, time: float) -> None:
        self._longest = max(self._longest or 0.0, abs(time))
        if self._given is None or self._features.drift is None:
            return
        share = abs(time - float(self._given[1].flatten()[0])) / (self._longest or 1.0)
        self._budget = self._budget.plus(self._features.drift * share)
        if self._budget.is_spent:
            self._notes.append(self._budget.note(self.step))

    def forget(self) -> None:
        """Drop the features: the next call is another model's, or without guidance, and whole."""
        self._features.clear()
        self._given = None

    @property
    def memory(self) -> dict[str, Any]:
        """State that a resumed run needs: the input of the last whole step."""
        assert self._given is not None, "a step was made"
        x, t = self._given
        last = self._computed_last
        return {"x": x, "t": t, "step": last, "longest": self._longest, "error": self._budget.error}

    def take_note(self) -> str | None:
        """The note of the current step, if it has one."""
        return self._notes.pop() if self._notes else None
