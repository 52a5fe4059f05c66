"""`abm2` in a diffusers pipeline: answers that carry plain Euler steps where the solver would go.

A scheduler of flow matching moves the latents by ``h v`` in each step: v the denoiser's velocity, h
the difference of two sigmas. Adams-Bashforth's line through two computed velocities is then a
predicted answer in each step that is left out. Adams-Moulton's rule replaces that line, once the
next velocity is known, by the one that ends there; what this moves the latents by, summed over the
steps left out, is added to the next answer, divided by its own h. So the scheduler is left alone,
and arrives where `everyframe.samplers.multistep` does (tested in float64).

It is linear in the answers, so each call is corrected apart: guidance that weights its branches by
numbers weights their corrections likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.quality import SamplingMethod
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.diffusers_pipelines.lossy.answer_prediction import Call, PredictedAnswers
from everyframe.diffusers_pipelines.lossy.call_budget import CallBudget
from everyframe.numerics.tensor_stats import value_range
from everyframe.precision.cast_hooks import map_tensors

#: The methods that need plain Euler steps in the velocity.
EULER_METHODS = ("abm2",)

#: diffusers' schedulers whose steps are plain Euler steps in the velocity.
_EULER_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler",)

#: Denoisers whose pipelines make the velocity of the answer by factors that change with the step.
_OTHER_ANSWERS = ("CosmosTransformer3DModel",)


def why_no_euler(
    scheduler: str, config: Mapping[str, Any], denoiser_classes: Sequence[str]
) -> str | None:
    """Why a pipeline's steps are no plain Euler steps in its answers; None if they are.

    `scheduler` is the scheduler's class and `config` its config.
    """
    if scheduler not in _EULER_SCHEDULERS:
        return f"its scheduler, {scheduler}, takes no plain Euler steps"
    if config.get("stochastic_sampling"):
        return f"its scheduler, {scheduler}, draws noise in each step (stochastic_sampling)"
    others = [each for each in denoiser_classes if each in _OTHER_ANSWERS]
    return f"the answers of its {others[0]} are no velocities" if others else None


class CorrectedAnswers(PredictedAnswers):
    """Context: predicted answers over the sigmas of `scheduler`, and corrected ones after them.

    An answer is corrected for those steps since its last computed one in which this call was
    predicted. The answers that later lines go through are the computed ones.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        watch: StepTracker,
        method: SamplingMethod,
        budget: CallBudget,
        scheduler: Any,
    ) -> None:
        super().__init__(denoisers, watch, method, budget)
        self._scheduler = scheduler
        #: Answers computed in the current step. Its sigma is known for sure when the next begins.
        self._newest: dict[Call, list[Tensor]] = {}
        #: The line through 0 at the last computed sigma with slope 1, summed over predicted steps.
        self._rises: dict[Call, float] = {}

    def _begin_step(self) -> None:
        index = self._scheduler.step_index
        if index is None:  # a schedule begins; some pipelines have one for each piece of a video
            for each in (self._histories, self._last, self._rises):
                each.clear()
        else:
            for call, found in self._newest.items():
                for history, tensor in zip(self._histories[call], found, strict=True):
                    history.add(self._sigma(index - 1), tensor)
        self._newest.clear()

    def _predict(self, call: Call, time: float) -> Any:
        return super()._predict(call, self._sigma(self._scheduler.step_index))

    def _note_skipped(self, call: Call) -> None:
        index = self._scheduler.step_index
        height = self._sigma(index) - self._histories[call][0].times[-1]
        self._rises[call] = self._rises.get(call, 0.0) + height * self._length(index)

    def _add_computed(self, call: Call, time: float, answer: Any, step: int) -> Any:
        found = self._tensors(call, answer)
        index = self._scheduler.step_index
        if index is not None:
            self._check(call, self._sigma(index), found, step)
        rise = self._rises.pop(call, 0.0)
        self._newest[call], self._last[call] = found, answer
        if not rise or not self._length(index) or self._budget.is_spent:
            return answer
        corrected = self._correct(call, answer, rise, index)
        return corrected if value_range(corrected).is_finite else answer

    def _correct(self, call: Call, answer: Any, rise: float, index: int) -> Any:
        """The answer that also moves the latents by what the steps before are corrected by."""
        histories, sigma = iter(self._histories[call]), self._sigma(index)

        def corrected(tensor: Tensor) -> Tensor:
            history = next(histories)
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            share = rise / (sigma - history.times[-1]) / self._length(index)
            found = tensor.to(dtype)
            change = found - history.predict(sigma, dtype)
            return (found + share * change).to(tensor.dtype)

        return map_tensors(answer, corrected)

    def _sigma(self, index: int) -> float:
        return float(self._scheduler.sigmas[index])

    def _length(self, index: int) -> float:
        return self._sigma(index + 1) - self._sigma(index)
