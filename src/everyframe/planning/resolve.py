"""Resolve a request and machine facts into a plan; the only place that asks what a machine can do.

Nothing is loaded, and nothing is fetched unless allowed.

Read next: `core/plan.py` (the result), `planning/request_fit.py` (memory and devices),
`engine/run.py` (the execution).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from everyframe.adapters.request_components import with_adapters
from everyframe.checkpoints.config_errors import config_errors
from everyframe.core.errors import CannotRunError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.limits import random_seed
from everyframe.core.plan import Plan, Settings
from everyframe.core.request import Request
from everyframe.core.torch_import import check_docstrings
from everyframe.families.registry import check_option_names, family_options
from everyframe.hardware.device_loss import translate_device_loss
from everyframe.hardware.facts import Freed, machine_facts
from everyframe.hardware.profiles import find_profile
from everyframe.planning.batches import with_batch
from everyframe.planning.division_checks import check_division
from everyframe.planning.dry_runs import clashes_of
from everyframe.planning.fast_paths.choose_fast_paths import FastPathChooser
from everyframe.planning.find_model import find_model, refuse_if_not_drawable
from everyframe.planning.infeasible import infeasible_reason
from everyframe.planning.load_balancing import BalancedPlan, idle_notes
from everyframe.planning.memory.memory_fit import FitResult
from everyframe.planning.previews import plan_previews
from everyframe.planning.quality import fit_to_quality, with_named_products
from everyframe.planning.request_fit import (
    RequestFit,
    Target,
    first_repairs,
    make_chooser,
    usable_devices,
)
from everyframe.planning.stage_forecasts import rates_of, stage_plans
from everyframe.runtime.components.patchable import notes_of, patches_of, saved_bytes_of
from everyframe.runtime.interface import ModelSpec, PromptReadingSpec
from everyframe.runtime.repair.repair_cache import repair_notes


@dataclass(frozen=True)
class LoadedModel:
    """An in-memory model and the name of its family.

    `digests` identifies the model by component, so that its run resumes with no other model.
    """

    family: str
    model: ModelSpec
    digests: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True)
class PreparedPlan:
    """A plan, its model, and what chose its fast paths and memory."""

    plan: Plan
    model: ModelSpec
    fitted: FitResult
    chooser: FastPathChooser


def resolve(
    request: Request, profile: str | Path | None = None, freed: Freed | None = None
) -> Plan:
    """Resolve a request into a plan with a time forecast; nothing is loaded or fetched.

    `profile` names another machine or a file with its facts; None is this machine, with what will
    be `freed` before the run. A machine that is too small, or on which the run would fail, gives a
    plan with `infeasible`, so that it can be shown. Raises `InputError` if the model can't do it.
    """
    return prepare(request, profile=profile, with_seconds=True, freed=freed).plan


def prepare(
    request: Request,
    *,
    may_fetch: bool = False,
    num_threads: int | None = None,
    devices: Sequence[DeviceFacts] | None = None,
    given: LoadedModel | None = None,
    profile: str | Path | None = None,
    with_seconds: bool = False,
    will_run: bool = False,
    freed: Freed | None = None,
) -> PreparedPlan:
    """Resolve a request into a plan, with its model; `may_fetch` allows fetching its configs.

    `num_threads` of the CPU are all usable cores by default; `devices` are those of ranks that
    joined already; `given` is an in-memory model. `with_seconds` is for a plan that is shown: this
    machine is measured for up to a second to forecast times, and prompts are checked against local
    tokenizers, as in a run. `will_run` tries fast paths without a certificate, for some seconds at
    most, so that the plan has only certified ones; otherwise it lists expected ones.
    """
    check_docstrings()
    # In-memory classes and the embedded model have no user files.
    is_foreign = given is None and request.model is not None
    with (
        _torchs_own_device() if given is None else nullcontext(),
        config_errors(str(request.model)) if is_foreign else nullcontext(),
        translate_device_loss("a device", "while the run was planned"),
    ):
        return _prepare(
            with_named_products(request), may_fetch, num_threads, devices, given, profile,
            with_seconds=with_seconds, will_run=will_run, freed=freed,
        )  # fmt: skip


def _torchs_own_device() -> AbstractContextManager[None]:
    """Context: no default device of the caller's. Plans that were made before need no torch."""
    if "torch" not in sys.modules:
        return nullcontext()
    from everyframe.hardware.thread_state import without_default_device

    return without_default_device()


def _prepare(
    request: Request,
    may_fetch: bool,
    num_threads: int | None,
    joined: Sequence[DeviceFacts] | None,
    given: LoadedModel | None,
    profile: str | Path | None,
    *,
    with_seconds: bool,
    will_run: bool,
    freed: Freed | None,
) -> PreparedPlan:
    model, family_name = _model(request, given, may_fetch=may_fetch)
    # Invalid requests are refused before the machine is read, which takes torch.
    settings, notes = model.resolve(request, _seed_of(request))
    _check_contents(request, settings, given)
    is_here = profile is None
    facts = (
        machine_facts(request.device, freed) if profile is None else find_profile(profile).machine()
    )
    devices = usable_devices(request, facts, joined)
    check_division(request, model, settings, len(devices))
    num_threads = num_threads or default_threads(facts, len(devices), is_here=is_here)
    target = Target(facts, devices, num_threads, is_here=is_here)
    chooser = make_chooser(request, target)
    # Repairs belong to this machine; an in-memory model may hold any weights.
    is_own = is_here and given is None
    repairs = first_repairs(request, model, target) if is_own else ()
    fit = RequestFit(request, model, target, chooser, repairs, will_run=will_run).fit
    fits, quality = fit_to_quality(fit, request, model, settings, target.device)
    shares, fit_used, fitted = fits
    preview, preview_notes = plan_previews(request, model, fitted.settings)
    unread = model.unread(settings) if with_seconds and isinstance(model, PromptReadingSpec) else ()
    measured = rates_of(fitted, devices[shares.rank], num_threads) if with_seconds else (None, ())
    rates, rate_notes = measured
    notes = (*notes, *quality.notes, *preview_notes, *unread, *rate_notes)
    plan = Plan(
        model=model.name,
        family=family_name,
        title=model.title,
        settings=fitted.settings,
        device=target.device,
        num_threads=num_threads,
        components=fitted.components,
        downloads=model.missing(),
        notes=(*notes, *_notes(model, shares, fitted), *chooser.known.notes(fitted.runs)),
        stages=stage_plans(fitted, rates, shares.division),
        dtype_errors=clashes_of(fitted.runs),
        host_bytes=fitted.host_bytes + saved_bytes_of(model),
        rates="" if rates is None else rates.source,
        profile=None if profile is None else str(profile),
        parallel=shares.division,
        loras=patches_of(model).loras,
        quality=quality.plan,
        preview=preview,
    )
    # An in-memory model is already loaded, so free memory is no limit for it.
    if given is None:
        plan = replace(plan, infeasible=infeasible_reason(request, plan, fit_used, fitted, facts))
    return PreparedPlan(with_batch(plan, model) if is_own else plan, model, fitted, chooser)


def _seed_of(request: Request) -> int:
    return random_seed() if request.seed is None else request.seed


def _notes(model: ModelSpec, shares: BalancedPlan, fitted: FitResult) -> tuple[str, ...]:
    repaired = (line for each in fitted.components for line in repair_notes(each))
    others = (*notes_of(model), *shares.notes, *repaired, *idle_notes(shares.division))
    return (*fitted.notes, *fitted.changes, *others)


def _model(
    request: Request, given: LoadedModel | None, *, may_fetch: bool
) -> tuple[ModelSpec, str]:
    check_option_names(request)
    if given is None:
        return find_model(request, may_fetch)
    family_options(given.family, request)
    return with_adapters(given.model, request), given.family


def _check_contents(request: Request, settings: Settings, given: LoadedModel | None) -> None:
    """Raise `InputError` for invalid images, and for what the embedded model can't draw."""
    asked = (request.image, request.last_image, request.extend)
    # Those with forms were checked when the request was resolved.
    if not settings.given_forms and any(each is not None for each in asked):
        from everyframe.media.frame_source import check_given  # brings NumPy

        check_given(request)
    if given is None and request.model is None:
        refuse_if_not_drawable(request)  # after sizes, which are cheaper to fix


def default_threads(facts: MachineFacts, num_ranks: int, *, is_here: bool = True) -> int:
    """A rank's share of all usable cores, or of OMP_NUM_THREADS on this machine."""
    # Of a list, such as 8,1, the first number is that of threads that start no others.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip() if is_here else ""
    number = int(limit) if limit.isdecimal() else 0
    return max(1, min(number or facts.num_cores, facts.num_cores) // num_ranks)


def check_feasible(plan: Plan) -> None:
    """Raise `CannotRunError` (exit 3) if the plan says that it can't run here."""
    if plan.infeasible is not None:
        raise CannotRunError(plan.infeasible)
