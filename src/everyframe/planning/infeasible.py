"""Explain in one sentence why a plan can't run on its machine, and what could.

`memory_fit.py` decides whether it fits; `dry_runs.py` finds clashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from everyframe.core.bytes import describe_process_shortage, fits, format_bytes
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.options import flag_of
from everyframe.core.plan import Plan, peak_of
from everyframe.core.request import Request
from everyframe.planning.dry_runs import describe_findings
from everyframe.planning.find_model import EMBEDDED_MODEL
from everyframe.planning.memory.memory_fit import FitResult, MemoryFit
from everyframe.planning.request_fit import within_limits


def infeasible_reason(
    request: Request, plan: Plan, fitting: MemoryFit, fitted: FitResult, facts: MachineFacts
) -> str | None:
    """Why the plan of a request can't run on its machine, and what could; None if it can."""
    if fitted.fits and not plan.dtype_errors:
        return None
    if fitted.fits:
        return (
            f"{describe_findings(plan)}: it would fail on {plan.device.name}; the first is "
            f"{plan.dtype_errors[0]} "
            "(--dtype fp32 has none where the model itself asks for no dtype)"
        )
    num_ranks = 1 if plan.parallel is None else len(plan.parallel.ranks)
    shortage = describe_process_shortage(num_ranks, facts.cpu)
    if plan.device.kind == "cpu" and shortage:
        return shortage
    text = f"not enough memory: {_needs(plan, fitting)}"
    smaller = fitting.largest(plan.settings)
    if smaller is not None:
        width, height = smaller.settings.width, smaller.settings.height
        frames = smaller.settings.num_frames
        more = "".join(
            f" {flag_of(name)} {value}"
            for name, value in smaller.settings.options
            if isinstance(value, int) and value != plan.settings.option(name, value)
        )
        return (
            f"{text}; the largest that fits is {width}x{height} with {frames} frames "
            f"(--size {width}x{height} --num-frames {frames}{more})"
        )
    device = _other_device(plan, fitting, within_limits(request, facts))
    if device is not None:
        return f"{text}; it would fit on {device} (--device {device})"
    if plan.parallel is not None and plan.device.kind == "cpu":
        return f"{text}; fewer devices take less of it"
    least = "" if plan.model == EMBEDDED_MODEL else " (the smallest model is --model shapes)"
    return f"{text}; no smaller video of this model fits{least}"


def _other_device(plan: Plan, fitting: MemoryFit, devices: Sequence[DeviceFacts]) -> str | None:
    """Name of the first other device that has the memory for the plan; None if none has."""
    # A card leaves as much to the host as this one; a CPU is the host, and holds everything.
    has_host = plan.host_bytes <= fitting.host_memory
    whole = [replace(each, resident_bytes=None, model_offload=False) for each in plan.components]
    for device in devices:
        needed = peak_of(whole) if device.kind == "cpu" else plan.peak_bytes
        can_hold = fits(needed, device) and (has_host or device.kind == "cpu")
        if can_hold and device.torch_name != plan.device.torch_name:
            return device.torch_name
    return None


def _needs(plan: Plan, fitting: MemoryFit) -> str:
    """Text about what needs more memory than there is, and how much there is."""
    if fits(plan.peak_bytes, fitting.device) and plan.host_bytes > fitting.host_memory:
        return (
            f"the host would hold {format_bytes(plan.host_bytes)} of weights and frames, it has "
            f"{format_bytes(fitting.host_memory)} free"
        )
    largest = max(plan.components, key=lambda part: part.peak_bytes)
    # Components of one stage are in memory together: none of them alone is too large.
    together = plan.peak_bytes > largest.peak_bytes
    what = f"{plan.title}, all of it in memory at once," if together else f"the {largest.title}"
    components = fitting.model.components(plan.settings)
    exceeds = any(
        each.name == largest.name and fitting.weights_exceed(each, plan.settings)
        for each in components
    )
    alone = f" ({format_bytes(largest.weight_bytes)} of weights alone)" if exceeds else ""
    copies = fitting.copies_of(largest.name)
    in_all = format_bytes(copies * plan.peak_bytes)
    each = f" on each of {copies} ranks, {in_all} in all" if copies > 1 else ""
    return (
        f"{what} needs about {format_bytes(plan.peak_bytes)}{alone}{each}, {plan.device.name} has "
        f"{format_bytes(fitting.device.free_memory)} free"
    )
