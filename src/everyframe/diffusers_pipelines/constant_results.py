"""Put the fast path `cached-constants` around a pipeline's denoisers, for one video."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from torch import nn

from everyframe.core.plan import Plan
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.fast_paths.modules.constant_results import PATH, CachedConstants
from everyframe.parallel.communicator import ParallelContext


def cache_constants(
    plan: Plan, denoisers: Mapping[str, nn.Module], watch: StepTracker, parallel: ParallelContext
) -> ExitStack:
    """Context: what no step changes is computed once, in the denoisers that the plan names.

    Ranks that share a video's tokens exchange tensors inside the model and compute all of it. Calls
    that are repeated for a repair are plain.
    """
    stack = ExitStack()
    for name, module in denoisers.items():
        paths = plan.component(name).fast_paths or ()
        if PATH in paths and parallel.denoiser_group.size == 1:
            stack.enter_context(CachedConstants(module, lambda: watch.is_paused))
    return stack
