"""Forecast the time of each stage, by rates that a profile has or this machine measured."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import StagePlan
from everyframe.dry_run.result import Work
from everyframe.planning.dry_runs import DryRun, call_seconds, heaviest, stage_plan
from everyframe.planning.memory.memory_fit import FitResult
from everyframe.planning.parallelism import sending_seconds, weights_seconds
from everyframe.planning.throughput_cache import rates_here
from everyframe.precision.dtypes import NUM_BYTES

#: Number of a plan's products measured on a real device to forecast its time.
_NUM_TRIALS = 6


def stage_plans(
    fitted: FitResult, rates: Throughput | None, division: ParallelPlan | None
) -> tuple[StagePlan, ...]:
    """Stage plans with time to communicate; weights go out during compute, so the longer counts.

    In a ring, keys go out during attention, and likewise.
    """
    steps, link = fitted.settings.num_denoiser_calls, None if rates is None else rates.link
    sending = sending_seconds(division, link) * steps
    weights = weights_seconds(division, link) * steps
    parts = {each.name: each for each in fitted.components}
    stages = []
    for run in fitted.runs:
        stage = stage_plan(run, parts[run.stage_call.component], rates)
        if run.stage_call.denoises and stage.seconds is not None and rates is not None:
            if division is not None and division.backend == "ring":
                sending = max(sending - _attention_seconds(run, rates), 0.0)
            # Counted once: of two experts, one runs in each step.
            weights *= run.found.num_passes
            stage = replace(stage, seconds=max(stage.seconds + sending, weights))
            sending = weights = 0.0
        stages.append(stage)
    return tuple(stages)


def _attention_seconds(run: DryRun, rates: Throughput) -> float:
    """Seconds of attention in a stage."""
    attention = tuple(each for each in run.found.work.products if each[0].kind == "attention")
    return call_seconds(Work(attention), rates) * run.stage_call.num_calls


def rates_of(
    fitted: FitResult, device: DeviceFacts, num_threads: int
) -> tuple[Throughput | None, tuple[str, ...]]:
    """Rates of a device: from the profile, or measured with the plan's heaviest products.

    None without a dry run to go by, or without the memory to measure in, which a note says.
    """
    if device.rates is not None or not fitted.runs:
        return device.rates, ()
    paths = {each.name: each.fast_paths for each in fitted.components}
    products = heaviest(fitted.runs, _NUM_TRIALS, paths)
    # A width in a config may be any number; the plan says that it is too large without rates too.
    has_room = max(map(_largest_operand, products), default=0) < device.free_memory
    rates = rates_here(products, device, num_threads) if has_room else None
    if rates is not None:
        return rates, ()
    return None, (
        f"how long it takes is not forecast: {device.torch_name} ({device.name}) has too little "
        "free memory to measure on",
    )


def _largest_operand(product: OpShape) -> int:
    """Bytes of the largest tensor that goes into a product."""
    return max(map(prod, product.shapes)) * NUM_BYTES.get(product.dtype, 2)
