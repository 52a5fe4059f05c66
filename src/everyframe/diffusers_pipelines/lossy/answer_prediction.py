"""Predict a pipeline's denoiser answers in some of its steps, around the denoisers' calls.

The pipeline makes its own call with its own scheduler and steps; a call of a step that is not
computed returns an extrapolated answer, tensor by tensor, in the form of the last computed one.
Answers are extrapolated apart for each denoiser and for each of its calls in a step (a prompt's
and a negative prompt's, say). It stands around `DenoiserReplay`: a resumed run replays the computed
answers and predicts the others from them again, so nothing of it is saved. A denoiser that has no
computed answer yet, such as a second expert, is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from everyframe.core.quality import SamplingMethod
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker, notify_step_tracker
from everyframe.diffusers_pipelines.lossy.call_budget import CallBudget
from everyframe.numerics.tensor_stats import iter_tensors, value_range
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.precision.cast_hooks import map_tensors
from everyframe.samplers.prediction import AnswerHistory

#: A denoiser's name, and which of its calls in a step.
Call = tuple[str, int]


class PredictedAnswers:
    """Context: calls of these denoisers, by name, are computed in some steps and else predicted.

    The error estimates in `budget` are those of each step's first call.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        watch: StepTracker,
        method: SamplingMethod,
        budget: CallBudget,
    ) -> None:
        self._denoisers, self._watch = dict(denoisers), watch
        self._method, self._budget = method, budget
        self._histories: dict[Call, list[AnswerHistory]] = {}
        self._last: dict[Call, Any] = {}
        self._num_calls: dict[str, int] = {}
        self._on = ExitStack()

    def __enter__(self) -> PredictedAnswers:
        for name, module in self._denoisers.items():
            self._on.enter_context(override_call(module, partial(self._answer_call, name)))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._on.close()
        if kind is None:
            self._budget.close()

    def _answer_call(self, name: str, made: ModuleCall) -> Any:
        if self._watch.is_paused:
            return made.compute()
        given = (made.module, made.args, made.kwargs)
        is_new, time = self._watch.next_step(*given)
        if is_new:
            self._num_calls.clear()
            self._begin_step()
        call = (name, self._num_calls.get(name, 0))
        self._num_calls[name] = call[1] + 1
        # The tracker counts from 1, and this call after it is made.
        step = self._watch.begun - 1 + is_new
        is_predicted = time is not None and call in self._last and self._budget.leaves_out(step)
        if is_predicted:
            assert time is not None
            answer = self._predict(call, time)
            if value_range(answer).is_finite:
                notify_step_tracker(self._watch, name, *given)
                self._note_skipped(call)
                return answer
        answer = made.compute()
        return answer if time is None else self._add_computed(call, time, answer, step)

    def _begin_step(self) -> None:
        """A step begins, with the call that is about to be made."""

    def _predict(self, call: Call, time: float) -> Any:
        tensors = iter([each.predict(time) for each in self._histories[call]])
        return map_tensors(self._last[call], lambda _: next(tensors))

    def _note_skipped(self, call: Call) -> None:
        """A predicted answer is taken."""

    def _add_computed(self, call: Call, time: float, answer: Any, step: int) -> Any:
        """Add a computed answer; returns what the pipeline gets for it."""
        found = self._tensors(call, answer)
        self._check(call, time, found, step)
        for history, tensor in zip(self._histories[call], found, strict=True):
            history.add(time, tensor)
        self._last[call] = answer
        return answer

    def _tensors(self, call: Call, answer: Any) -> list[Tensor]:
        """The tensors of an answer, as many as the call has histories."""
        found: list[Tensor] = list(iter_tensors(answer))
        histories = self._histories.setdefault(call, [])
        if len(histories) != len(found):
            histories[:] = [AnswerHistory(self._method) for _ in found]
        return found

    def _check(self, call: Call, time: float, found: list[Tensor], step: int) -> None:
        """Add the error estimate of a step's first call to the budget."""
        if call[1] == 0 and found and not self._budget.is_spent:
            self._budget.add(self._histories[call][0].step_estimate(time, found[0]), step)
