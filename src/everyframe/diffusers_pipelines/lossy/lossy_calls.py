"""Put the lossy method of a plan around a pipeline's denoisers, for one video."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from everyframe.core.events import Event, Note
from everyframe.core.plan import Plan
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.diffusers_pipelines.lossy.answer_prediction import PredictedAnswers
from everyframe.diffusers_pipelines.lossy.call_budget import CallBudget
from everyframe.diffusers_pipelines.lossy.deep_cache import DeepCachedCalls
from everyframe.diffusers_pipelines.lossy.euler_correction import EULER_METHODS, CorrectedAnswers
from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.parallel.communicator import ParallelContext

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def lossy_calls(
    plan: Plan,
    denoisers: Mapping[str, nn.Module],
    watch: StepTracker,
    scheduler: Any,
    parallel: ParallelContext,
    branches: CfgBranches | None,
    seed: int,
    emit: Callable[[Event], None],
) -> Contexts:
    """Contexts inside and outside of that of saved answers; `branches` are split across ranks.

    Split branches have no whole answers on each rank, so all steps are exact then, with a note.
    """
    method, group = plan.settings.method, parallel.video_group
    if method is None:
        return nullcontext(), nullcontext()
    if branches is not None:
        why = "guidance branches are on different devices, so all steps are exact"
        emit(Note(f"quality {method}: {why}", in_record=True, seed=seed))
        return nullcontext(), nullcontext()

    def agree(is_over: bool) -> bool:
        return bool(group.broadcast_object(is_over, 0, "the error budget"))

    budget = CallBudget(method, plan.settings.num_inference_steps, agree, seed, emit)
    if method.is_cache:
        (unet,) = denoisers.values()  # what the spec allows has one
        deep = DeepCachedCalls(unet, watch, budget)
        return deep.computing(), deep
    if method.name in EULER_METHODS:
        return nullcontext(), CorrectedAnswers(denoisers, watch, method, budget, scheduler)
    return nullcontext(), PredictedAnswers(denoisers, watch, method, budget)
