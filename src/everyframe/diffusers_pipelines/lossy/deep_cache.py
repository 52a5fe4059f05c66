"""DeepCache in a diffusers pipeline: its UNet is computed whole in some steps, and shallow else.

The pipeline makes its own call. On resume, saved answers are served without computing anything;
the first call that is computed has the last whole step computed again for its features, which gives
the same bits. So nothing of it is saved. The error estimate of a whole step is the change of the
answer since the step before it, relative and times the share of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.diffusers_pipelines.lossy.call_budget import CallBudget
from everyframe.fast_paths.modules.deep_features import DeepFeatures
from everyframe.numerics.tensor_stats import iter_tensors
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.ops.dtypes import upcast_to_widest


class DeepCachedCalls:
    """Calls of a pipeline's UNet, computed whole in some steps.

    `computing` is the innermost context around the UNet, within that of saved answers; the object
    itself is the outermost one.
    """

    def __init__(
        self,
        unet: nn.Module,
        watch: StepTracker,
        budget: CallBudget,
    ) -> None:
        self._unet, self._watch, self._budget = unet, watch, budget
        self._features = DeepFeatures(unet, lambda: watch.is_paused and not self._is_filling)
        self._is_filling = False
        self._num_calls = 0
        self._is_whole = True
        #: Arguments of the calls of the last whole step before this one, and of this step's.
        self._last: list[tuple[Any, Any]] = []
        self._given: list[tuple[Any, Any]] = []
        self._answer: tuple[float, Tensor] | None = None
        self._longest = 0.0
        self._on = ExitStack()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context: calls that are not served from a run's saved answers are computed here."""
        with self._features, override_call(self._unet, self._compute):
            yield

    def __enter__(self) -> DeepCachedCalls:
        self._on.enter_context(override_call(self._unet, self._answer_call))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._on.close()
        if kind is None:
            self._budget.close()

    def _answer_call(self, call: ModuleCall) -> Any:
        if self._watch.is_paused:
            return call.compute()
        is_new, time = self._watch.next_step(call.module, call.args, call.kwargs)
        step = self._watch.begun - 1 + is_new  # the tracker counts from 1, after this call
        if is_new:
            self._begin(step)
        self._num_calls += 1
        if self._is_whole:
            self._given.append((call.args, call.kwargs))
        answer = call.compute()
        if time is not None and self._num_calls == 1:
            self._check(time, next(iter_tensors(answer)), step)
        return answer

    def _begin(self, step: int) -> None:
        if self._is_whole and self._given:
            self._last, self._given = self._given, []
        self._is_whole = not self._budget.leaves_out(step) or not self._last
        self._num_calls = 0

    def _compute(self, call: ModuleCall) -> Any:
        if not self._watch.is_paused:
            features, number = self._features, self._num_calls - 1
            if not self._is_whole and not features.has(number) and number < len(self._last):
                self._fill(partial(call.base.__call__, call.module))
            features.is_shallow = not self._is_whole
            features.begin(number)
        return call.compute()

    def _fill(self, compute: Callable[..., Any]) -> None:
        """Compute the last whole step again, unseen by tracker and guard."""
        self._features.is_shallow, self._is_filling = False, True
        try:
            with self._watch.paused():
                for number, (args, kwargs) in enumerate(self._last):
                    self._features.begin(number)
                    compute(*args, **kwargs)
        finally:
            self._is_filling = False

    def _check(self, time: float, answer: Tensor, step: int) -> None:
        before, self._answer = self._answer, (time, answer)
        self._longest = max(self._longest, abs(time))
        if before is None or not self._is_whole or self._budget.is_spent:
            return
        wide = upcast_to_widest(answer)
        change = float((wide - upcast_to_widest(before[1])).norm() / wide.norm())
        self._budget.add(change * abs(time - before[0]) / (self._longest or 1.0), step)
