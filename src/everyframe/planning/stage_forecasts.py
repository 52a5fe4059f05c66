"""Forecast the time of each stage, by rates that a profile has or this machine measured."""

from __future__ import annotations

from dataclasses import replace

from everyframe.core.facts import DeviceFacts, Throughput
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import StagePlan
from everyframe.planning.dry_runs import heaviest, stage_plan
from everyframe.planning.memory_fit import FitResult
from everyframe.planning.parallelism import sending_seconds, weights_seconds
from everyframe.planning.throughput_cache import rates_here

#: Number of a plan's products measured on a real device to forecast its time.
_NUM_TRIALS = 6


def stage_plans(
    fitted: FitResult, rates: Throughput | None, division: ParallelPlan | None
) -> tuple[StagePlan, ...]:
    """Stage plans with time to communicate; weights go out during compute, so the longer counts."""
    steps = fitted.settings.num_denoiser_calls
    sending, weights = sending_seconds(division) * steps, weights_seconds(division) * steps
    parts = {part.name: part for part in fitted.components}
    stages = []
    for run in fitted.runs:
        stage = stage_plan(run, parts[run.stage_call.component], rates)
        if run.stage_call.denoises and stage.seconds is not None:
            # Once: of two experts one works at each step.
            stage = replace(stage, seconds=max(stage.seconds + sending, weights))
            sending = weights = 0.0
        stages.append(stage)
    return tuple(stages)


def rates_of(fitted: FitResult, device: DeviceFacts, num_threads: int) -> Throughput | None:
    """Rates of a device: from the profile, or measured with the plan's heaviest products."""
    if device.rates is not None or not fitted.runs:
        return device.rates
    paths = {part.name: part.fast_paths for part in fitted.components}
    products = heaviest(fitted.runs, _NUM_TRIALS, paths)
    return rates_here(products, device, num_threads)
