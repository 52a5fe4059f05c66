"""Why a plan can't be done on its machine, and what could be: one sentence for a person.

Not here: whether it fits (`fitting.py`) and what the dry run found (`dryrun.py`).
"""

from __future__ import annotations

from everyframe.core.facts import MachineFacts
from everyframe.core.plan import Plan
from everyframe.planning.dryrun import says
from everyframe.planning.fitting import Fitted, Fitting
from everyframe.planning.forecast import PROCESS_BYTES, USABLE_SHARE, describe_bytes, fits
from everyframe.planning.models import EMBEDDED_MODEL


def obstacle_of(plan: Plan, fitting: Fitting, fitted: Fitted, facts: MachineFacts) -> str | None:
    """Why a plan can't be done on its machine and what could, or None."""
    if fitted.fits and not plan.clashes:
        return None
    if fitted.fits:
        return (
            f"{says(plan)}: it would fail on {plan.device.name}; the first is {plan.clashes[0]} "
            "(--dtype fp32 has none where the model itself asks for no dtype)"
        )
    too_many = _too_many_processes(plan, facts)
    if too_many:
        return too_many
    text = f"not enough memory: {_needs(plan, fitting)}"
    smaller = fitting.largest(plan.settings)
    if smaller is not None:
        width, height = smaller.settings.width, smaller.settings.height
        frames = smaller.settings.num_frames
        return (
            f"{text}; the largest that fits is {width}x{height} with {frames} frames "
            f"(--size {width}x{height} --num-frames {frames})"
        )
    others = [
        d.torch_name
        for d in facts.devices
        if d.torch_name != plan.device.torch_name and fits(plan.peak_bytes, d)
    ]
    if others:
        return f"{text}; it would fit on {others[0]} (--device {others[0]})"
    least = "" if plan.model == EMBEDDED_MODEL else " (the smallest model is --model shapes)"
    return f"{text}; no smaller video of this model fits{least}"


def _too_many_processes(plan: Plan, facts: MachineFacts) -> str:
    """What is said where the ranks of a CPU leave nothing for what they are to do, else nothing."""
    ranks = 1 if plan.division is None else len(plan.division.ranks)
    if plan.device.kind != "cpu" or ranks == 1 or fits(ranks * PROCESS_BYTES, facts.cpu):
        return ""
    most = max(1, int(facts.cpu.free_memory * USABLE_SHARE / PROCESS_BYTES) - 1)
    return (
        f"not enough memory: {ranks} processes take about "
        f"{describe_bytes(ranks * PROCESS_BYTES)} for themselves, {plan.device.name} has "
        f"{describe_bytes(facts.cpu.free_memory)} free; give fewer devices, {most} at most"
    )


def _needs(plan: Plan, fitting: Fitting) -> str:
    """What needs more than there is, and how much there is."""
    if fits(plan.peak_bytes, fitting.device) and plan.host_bytes > fitting.host_memory:
        return (
            f"the host would hold {describe_bytes(plan.host_bytes)} of weights and frames, it has "
            f"{describe_bytes(fitting.host_memory)} free"
        )
    largest = max(plan.components, key=lambda part: part.peak_bytes)
    # Parts that share a stage are in memory together: none of them alone is what is too large.
    together = plan.peak_bytes > largest.peak_bytes
    what = f"{plan.title}, all of it in memory at once," if together else f"the {largest.title}"
    components = fitting.model.components(plan.settings)
    exceeds = any(
        each.name == largest.name and fitting.weights_exceed(each, plan.settings)
        for each in components
    )
    alone = f" ({describe_bytes(largest.weight_bytes)} of weights alone)" if exceeds else ""
    return (
        f"{what} needs about {describe_bytes(plan.peak_bytes)}{alone}, {plan.device.name} has "
        f"{describe_bytes(fitting.device.free_memory)} free"
    )
