"""The one resolver: Request + facts -> Plan. Here alone is asked what the machine can do.

Nothing is loaded and, unless told so, nothing is fetched. Read next: `core/plan.py` for what comes
out, `engine/run.py` for who runs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from everyframe.checkpoints.fetch import fetch_missing
from everyframe.checkpoints.find import Location, locate
from everyframe.core.errors import CannotRunError, CheckpointError, InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.plan import ComponentPlan, Plan, Settings
from everyframe.core.request import DTYPES, Request, random_seed
from everyframe.families.family import Component, Model
from everyframe.families.registry import (
    check_option_names,
    family,
    family_names,
    family_options,
    options_of,
)
from everyframe.hardware.facts import machine_facts, pick_device
from everyframe.planning.forecast import describe_bytes, fits
from everyframe.planning.models import refuse_if_not_drawable
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import weight_bytes
from everyframe.precision.policy import choose

EMBEDDED_MODEL = "shapes"


@dataclass(frozen=True)
class GivenModel:
    """A model in memory and the name of its family."""

    family: str
    model: Model


@dataclass(frozen=True)
class Prepared:
    """A plan and the model that it is for."""

    plan: Plan
    model: Model


def resolve(request: Request) -> Plan:
    """The plan of a request on this machine; nothing is loaded or fetched.

    Raises `InputError` for what can't be asked of the model. What this machine is too small for is
    a plan with an `obstacle`, so that it can be shown.
    """
    return prepare(request).plan


def prepare(
    request: Request,
    *,
    may_fetch: bool = False,
    num_threads: int | None = None,
    given: GivenModel | None = None,
) -> Prepared:
    """The plan with its model; with `may_fetch` a hub model's configs may be fetched for it.

    `num_threads` (of the CPU) is the number of usable cores unless a record asks for another.
    `given` is a model that somebody has in memory, in place of one that the request names.
    """
    check_option_names(request)
    if given is not None:
        family_options(given.family, request)
        model, family_name = given.model, given.family
    else:
        if request.model is None:
            refuse_if_not_drawable(request)
        model, family_name = _find_model(request, may_fetch)
    facts = machine_facts(request.device)
    device = pick_device(facts, request.device)
    seed = random_seed() if request.seed is None else request.seed
    settings, notes = model.settle(request, seed)
    components, precision_notes = _components(model, settings, device, request)
    plan = Plan(
        model=model.name,
        family=family_name,
        title=model.title,
        settings=settings,
        device=device,
        num_threads=num_threads or _default_threads(facts),
        components=components,
        to_fetch=model.missing(),
        notes=(*notes, *precision_notes),
    )
    plan = replace(plan, obstacle=_obstacle(plan, model, facts, request))
    return Prepared(plan, model)


def _default_threads(facts: MachineFacts) -> int:
    """Every usable core, or as many as OMP_NUM_THREADS allows."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(limit), facts.num_cores) if limit.isdigit() and int(limit) else facts.num_cores


def check_feasible(plan: Plan) -> None:
    """Raise `CannotRunError` (exit 3) if the plan says that it can't be done here."""
    if plan.obstacle is not None:
        raise CannotRunError(plan.obstacle)


def _find_model(request: Request, may_fetch: bool) -> tuple[Model, str]:
    # Before the family is known: what is fetched depends on it.
    variant = request.family_options.get("variant")
    location = locate(request.model or EMBEDDED_MODEL, variant=variant)
    if location.kind == "embedded" and not location.complete:
        raise CheckpointError("the embedded model is not in this installation; install it again")
    if location.kind == "hub" and not location.complete:
        if not may_fetch:
            raise InputError(
                f"{location.asked} is not on this disk, and its configs are needed to plan"
                f"{location.hint}; `everyframe generate` fetches it, "
                f"or `hf download {location.asked}`"
            )
        location = fetch_missing(location)
    for name in family_names():
        found = family(name).recognise(location, _tolerant_options(name, request))
        if found is not None:
            family_options(name, request)
            return found, name
    raise CheckpointError(_no_family(location))


def _tolerant_options(name: str, request: Request) -> Any:
    """The options that this family knows; another family's are told once the model is known."""
    own = options_of(name)
    given: Mapping[str, Any] = request.family_options
    return own(**{key: value for key, value in given.items() if key in own.model_fields})


def _no_family(location: Location) -> str:
    families = ", ".join(family(name).title for name in family_names())
    return f"{location.asked} is a model of no family that is known here; known are: {families}"


def _components(
    model: Model, settings: Settings, device: DeviceFacts, request: Request
) -> tuple[tuple[ComponentPlan, ...], tuple[str, ...]]:
    plans: list[ComponentPlan] = []
    notes: dict[str, None] = {}
    for component in model.components(settings):
        made, said = _component(component, device, DTYPES[request.dtype])
        plans.append(made)
        notes.update(dict.fromkeys(said))
    return tuple(plans), tuple(notes)


def _component(
    component: Component, device: DeviceFacts, asked: str
) -> tuple[ComponentPlan, tuple[str, ...]]:
    precision, notes = (
        choose(device, asked, component.needs)
        if component.has_precision is None
        else (component.has_precision, ())
    )
    plan = ComponentPlan(
        name=component.name,
        title=component.title,
        stage=component.stage,
        source=component.source,
        num_parameters=sum(component.num_elements.values()),
        device=device.torch_name,
        precision=precision,
        weight_bytes=weight_bytes(component.num_elements, precision),
        working_bytes=component.working_bytes(num_bytes(precision.compute)),
    )
    return plan, notes


def _obstacle(plan: Plan, model: Model, facts: MachineFacts, request: Request) -> str | None:
    """Why it can't be done here and what could, or None."""
    if fits(plan.peak_bytes, plan.device):
        return None
    largest = max(plan.components, key=lambda part: part.peak_bytes)
    # Parts that share a stage are in memory together: none of them alone is what is too large.
    together = plan.peak_bytes > largest.peak_bytes
    what = f"{plan.title}, all of it in memory at once," if together else f"the {largest.title}"
    text = (
        f"not enough memory: {what} needs about {describe_bytes(plan.peak_bytes)}, "
        f"{plan.device.name} has {describe_bytes(plan.device.free_memory)} free"
    )
    for settings in model.smaller(plan.settings):
        components, _ = _components(model, settings, plan.device, request)
        if fits(replace(plan, components=components).peak_bytes, plan.device):
            return (
                f"{text}; the largest that fits is {settings.width}x{settings.height} with "
                f"{settings.num_frames} frames "
                f"(--size {settings.width}x{settings.height} --num-frames {settings.num_frames})"
            )
    others = [d.torch_name for d in facts.devices if d != plan.device and fits(plan.peak_bytes, d)]
    if others:
        return f"{text}; it would fit on {others[0]} (--device {others[0]})"
    return f"{text}; no smaller video of this model fits; --model shapes does"
