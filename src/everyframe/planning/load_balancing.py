"""Balance load across unequal devices by measured speed, with smaller shares where memory is short.

Equal devices get equal shares. Unequal devices get shares proportional to speed. A device whose
memory is too small for its share gets less, and the others take the rest. All compute in a
precision that every device supports. Requested shares (``--shares``) are not changed.
`everyframe.parallel.token_partition` turns shares into tokens; `parallelism.py` lists the possible
divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor
from typing import TYPE_CHECKING

from everyframe.core.bytes import USABLE_SHARE, share_of
from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import Settings
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory, empty_cache
from everyframe.hardware.throughput import measured_rates
from everyframe.planning.memory.memory_fit import FitResult, MemoryFit
from everyframe.runtime.interface import ModelSpec, ShardableSpec

if TYPE_CHECKING:
    from everyframe.planning.memory.component_memory import ComponentPlanner

#: Speeds are rounded to this many steps, so that measurement noise changes no share.
_STEPS = 16
#: Steps of shares for memory, and maximum rounds of adjustment.
_FINE, _ROUNDS = 256, 4
#: Speed is measured with a linear layer of a denoiser's size.
_ROWS, _WIDTH, _WIDER = 2048, 1152, 4608


def are_alike(devices: Sequence[DeviceFacts]) -> bool:
    """Whether the devices are of one model; their free memory may differ."""
    return len({(device.name, device.kind, device.memory) for device in devices}) == 1


def common_facts(devices: Sequence[DeviceFacts]) -> DeviceFacts:
    """The first of these devices, limited to what all of them have."""
    first = devices[0]
    least = min(device.free_memory for device in devices)
    if are_alike(devices):
        return replace(first, free_memory=least)
    known = [device.capability for device in devices if device.capability is not None]
    limits = [each.max_array_bytes for each in devices if each.max_array_bytes is not None]
    return replace(
        first,
        memory=min(device.memory for device in devices),
        free_memory=least,
        capability=min(known) if len(known) == len(devices) else None,
        has_fast_bf16=all(device.has_fast_bf16 for device in devices),
        has_fast_fp16=all(device.has_fast_fp16 for device in devices),
        dtypes=tuple(
            dtype for dtype in first.dtypes if all(dtype in device.dtypes for device in devices)
        ),
        max_array_bytes=min(limits, default=None),
    )


def with_rate(device: DeviceFacts, dtype: str, num_threads: int) -> DeviceFacts:
    """That device of this machine with its measured rate of products in `dtype`.

    One with too little free memory to measure on counts as far slower than any other.
    """
    product = OpShape("product", dtype, ((_ROWS, _WIDTH), (_WIDTH, _WIDER)))
    measure = partial(measured_rates, (product,), device.torch_name, num_threads)
    rates = catch_out_of_memory(measure)
    if isinstance(rates, OutOfMemory):
        empty_cache()  # of what the failed trial held
        rates = Throughput(((dtype, 1.0),), 1.0, 1.0, "too little free memory to measure on")
    return replace(device, rates=rates)


def speed_dtype(asked: str) -> str:
    """Compute dtype of unequal devices: float32 unless requested otherwise.

    No fast path is certified for all of them.
    """
    return "float32" if asked == "auto" else asked


def weights_by_speed(
    devices: Sequence[DeviceFacts], dtype: str, num_threads: int
) -> tuple[float, ...]:
    """Speeds relative to the fastest device; unequal devices without rates are measured."""
    if are_alike(devices):
        return (1.0,) * len(devices)
    tried = [each if each.rates else with_rate(each, dtype, num_threads) for each in devices]
    speeds = [each.rates.product(dtype) for each in tried if each.rates is not None]
    return tuple(max(1, round(_STEPS * speed / max(speeds))) / _STEPS for speed in speeds)


@dataclass(frozen=True)
class BalancedPlan:
    """A division, the memory fit of its tightest rank, and notes about the shares."""

    division: ParallelPlan | None
    fitting: MemoryFit
    rank: int = 0
    notes: tuple[str, ...] = ()


def balance(
    fitting: MemoryFit,
    devices: Sequence[DeviceFacts],
    settings: Settings,
    weights: Sequence[float],
    divided: Callable[[Sequence[float]], ParallelPlan | None],
    *,
    is_asked: bool,
) -> BalancedPlan:
    """Divide by `weights`, with smaller shares where memory is short unless shares are requested.

    `is_asked` says that they are.
    """
    division = divided(weights)
    frees = {device.free_memory for device in devices}
    if division is None or len(frees) == 1 or not isinstance(fitting.model, ShardableSpec):
        own = fitting.of_ranks(division, settings)
        return BalancedPlan(division, own, notes=_share_notes(division, devices, ()))
    by_speed, short = division, set[int]()
    for _ in range(0 if is_asked else _ROUNDS):
        needs = _needs(fitting.planner, division, settings)
        fit = [min(1.0, need.share_that_fits(devices[r])) for r, need in enumerate(needs)]
        if min(fit) == 1:
            break
        pairs = zip(division.speeds, fit, strict=True)
        fewer = [floor(_FINE * w * f) / _FINE if f < 1 else w for w, f in pairs]
        if not min(fewer):  # its weights alone are too much, which no share makes less
            division, short = by_speed, set()
            break
        short |= {rank for rank, share in enumerate(fit) if share < 1}
        division = divided(fewer)
        assert division is not None
    needs = _needs(fitting.planner, division, settings)
    tightest = max(range(len(devices)), key=lambda r: share_of(needs[r].peak, devices[r]))
    fitting = fitting.of_rank(division, tightest, settings, devices[tightest], devices[0])
    return BalancedPlan(division, fitting, tightest, _share_notes(division, devices, sorted(short)))


@dataclass(frozen=True)
class _Need:
    """Bytes of a rank's denoiser: a fixed amount, and one proportional to its share."""

    held: int
    working: int

    @property
    def peak(self) -> int:
        return self.held + self.working

    def share_that_fits(self, device: DeviceFacts) -> float:
        """The multiple of its share that fits into the device's memory."""
        room = device.free_memory * USABLE_SHARE - self.held
        return max(0.0, room / max(1, self.working))


def _needs(planner: ComponentPlanner, division: ParallelPlan, settings: Settings) -> list[_Need]:
    """What each rank needs for its portion of a step."""
    step = next(each for each in planner.dry_run_calls(settings) if each.denoises)
    needs = []
    for rank, its in enumerate(division.ranks):
        if not its.is_active:
            needs.append(_Need(0, 0))
            continue
        plan = planner.of_rank(division, rank, settings).plan_named(step.component, settings).plan
        needs.append(_Need(plan.on_device_bytes, plan.working_bytes))
    return needs


def with_weights(
    division: ParallelPlan | None, model: ModelSpec, fitted: FitResult
) -> ParallelPlan | None:
    """The division with the maximum weight bytes that each rank sends per step."""
    held = next((each for each in fitted.components if each.num_weight_shards > 1), None)
    if division is None or held is None or not isinstance(model, ShardableSpec):
        return division
    # Late import: brings torch.
    from everyframe.runtime.memory.weight_sharding import sharded_bytes

    run = next(run for run in fitted.runs if run.stage_call.component == held.name)
    branches = model.num_branches(fitted.settings)
    calls = ceil(branches / fitted.settings.saving("branches_at_once", branches))
    ranks = list(division.ranks)
    for group in division.groups:
        room = [ranks[rank].memory_share for rank in group]
        sizes = sharded_bytes(run.stage_call.module(), held.precision, room)
        for rank, size in zip(group, sizes, strict=True):
            sent = size * (len(group) - 1) * calls
            ranks[rank] = replace(ranks[rank], weight_bytes=sent)
    return replace(division, ranks=tuple(ranks))


def _share_notes(
    division: ParallelPlan | None, devices: Sequence[DeviceFacts], short: Sequence[int]
) -> tuple[str, ...]:
    """Notes about unequal shares."""
    if division is None or len(set(division.speeds)) == 1:
        return ()
    whole = sum(division.speeds)
    each = ", ".join(
        f"{device.torch_name} ({device.name}) {weight / whole:.0%}"
        for device, weight in zip(devices, division.speeds, strict=True)
    )
    names = " and ".join(devices[rank].torch_name for rank in short)
    less = f"; {names} would do more by speed, and has no memory for it" if short else ""
    return (f"shares of the work: {each}{less}",)


def idle_notes(division: ParallelPlan | None) -> tuple[str, ...]:
    """Notes on ranks that are idle at times, and why."""
    whys: dict[str, list[int]] = {}
    for rank, plan in enumerate(division.ranks if division is not None else ()):
        if plan.idle_reason:
            whys.setdefault(plan.idle_reason, []).append(rank)
    return tuple(f"{_list_ranks(ranks)}: {why}" for why, ranks in whys.items())


def _list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words; consecutive ones as a range."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, last = ranks[0], ranks[-1]
    in_a_row = len(ranks) > 2 and len(ranks) == last - first + 1
    return f"ranks {first} to {last}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"
