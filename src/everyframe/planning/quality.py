"""Choose the lossy method of a quality budget from what was measured for this model here.

A budget selects the fastest method whose worst frame in the calibration met it with a margin.
Without a calibration all steps are exact, and a note names the command that makes one. A method
named in the request or a record is used as is. Its 8-bit products are part of the components'
precision, as with ``--quantize``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Settings
from everyframe.core.quality import (
    EXACT,
    PRODUCTS,
    LossyMethod,
    QualityPlan,
    SamplingMethod,
    parse_method,
    parse_quality,
)
from everyframe.core.request import Request
from everyframe.fast_paths.calibrations import Calibration, nearest_calibration
from everyframe.fast_paths.certificates import device_key, digest
from everyframe.fast_paths.registry import switched_off
from everyframe.planning.component_precision import can_multiply
from everyframe.planning.fast_paths.choose_fast_paths import has_torchao
from everyframe.planning.load_balancing import BalancedPlan
from everyframe.planning.memory.memory_fit import FitResult, MemoryFit
from everyframe.runtime.components.patchable import known_digest_with_loras
from everyframe.runtime.interface import LossySpec, ModelSpec


@dataclass(frozen=True)
class QualityChoice:
    """The settings with their sampling method, what the plan says of it, and notes.

    `products` are those of the components, which the settings say nothing of.
    """

    settings: Settings
    plan: QualityPlan | None = None
    notes: tuple[str, ...] = ()
    products: str = ""


Fit: TypeAlias = tuple[BalancedPlan, MemoryFit, FitResult]
"""Shares of the work, the memory fit of the tightest rank, and its result."""


def fit_to_quality(
    fit: Callable[[Settings, str], Fit],
    request: Request,
    model: ModelSpec,
    settings: Settings,
    device: DeviceFacts,
) -> tuple[Fit, QualityChoice]:
    """The fit, of settings and products, with the method that the exact run's precision leads to.

    Products that this run's trial refuses are not chosen.
    """
    exact = fit(settings, "")
    choice = choose_method(request, model, settings, exact[-1].components, device)
    if (choice.settings, choice.products) == (settings, ""):
        return exact, choice
    found = fit(choice.settings, choice.products)
    if choice.products in ("", *kinds_of(found[-1].components)):
        return found, choice
    without = Request(**{**request.given(), "disable": (*request.disable, choice.products)})
    found, other = fit_to_quality(fit, without, model, settings, device)
    note = f"quality {request.quality}: without {choice.products}, which is not certified here"
    return found, replace(other, notes=(note, *other.notes))


def kinds_of(components: Sequence[ComponentPlan]) -> frozenset[str]:
    """How weights of these components are stored or multiplied; without those in their dtype."""
    return frozenset(each.precision.weight_dtype for each in components) - {""}


def with_named_products(request: Request) -> Request:
    """The request with the products of the method that its quality names, as by ``--quantize``.

    Raises:
        InputError: ``--quantize`` says otherwise.
    """
    asked = parse_quality(request.quality)
    if not isinstance(asked, LossyMethod) or not asked.products or request.quantized is not None:
        return request
    if request.quantize not in ("auto", asked.products):
        raise InputError(
            f"quality={request.quality} and quantize={request.quantize} both say how linear layers "
            "are computed; give one of them"
        )
    return Request(**{**request.given(), "quantize": asked.products})


def products_of(
    request: Request, components: Sequence[ComponentPlan], device: DeviceFacts
) -> tuple[str, ...]:
    """Products in eight bits that a method could have on that device, certified or not.

    None where the request or the plan of the exact run says how linear layers are computed.
    """
    is_given = request.quantize != "auto" or request.compile or request.compiled is not None
    if is_given or kinds_of(components):
        return ()
    off = switched_off(request.disable)
    return tuple(kind for kind in PRODUCTS if kind not in off and can_multiply(device, kind))


def choose_method(
    request: Request,
    model: ModelSpec,
    settings: Settings,
    components: Sequence[ComponentPlan],
    device: DeviceFacts,
) -> QualityChoice:
    """The method for the request's quality; `components` are planned for exact steps.

    Raises:
        InputError: a named method that this model can't do, or that is disabled.
    """
    asked, recorded = parse_quality(request.quality), request.method
    if asked is None and (recorded is None or recorded.sampling is None):
        return QualityChoice(settings)
    if recorded is not None:
        return _chosen(request, model, settings, recorded, components, "as recorded")
    if isinstance(asked, LossyMethod):
        if asked.products in switched_off(request.disable):
            raise InputError(f"quality {asked}: {asked.products} is disabled (--disable)")
        return _chosen(request, model, settings, asked, components, "named, not measured")
    assert isinstance(asked, float)
    allowed = _allowed_methods(request, model, settings, components, device)
    why_not = _why_exact(model, settings, allowed)
    key = None if why_not else calibration_key(model, settings, components, device)
    found = None if key is None else nearest_calibration(key, size_of(settings))
    if why_not is None and found is None:
        why_not = (
            "not measured here for this model, precision and number of steps, at this size or a "
            "smaller one; "
            f"`{command_of(request)}` measures it"
        )
    if why_not is None:
        assert found is not None
        can_guide = can_guide_partly(model, request)
        fastest = found.fastest(asked, allowed, can_guide_partly=can_guide)
        return _choose_measured(request, settings, found, asked, fastest)
    return _exact(request, settings, why_not)


def _exact(request: Request, settings: Settings, why: str) -> QualityChoice:
    note = f"quality {request.quality}: all steps are exact, as it is {why}"
    return QualityChoice(settings, QualityPlan(request.quality, EXACT, why), (note,))


def _chosen(
    request: Request,
    model: ModelSpec,
    settings: Settings,
    method: LossyMethod,
    components: Sequence[ComponentPlan],
    why: str,
) -> QualityChoice:
    """The method as it is given, without products that the components don't have."""
    if method.sampling is not None:
        _check(method.sampling, model, settings, request)
    if method.products not in ("", *kinds_of(components)):
        method, why = replace(method, products=""), f"{why}; without {method.products}: see notes"
    settings = replace(settings, method=method.sampling)
    return QualityChoice(settings, QualityPlan(request.quality, str(method), why))


def _choose_measured(
    request: Request,
    settings: Settings,
    found: Calibration,
    decibels: float,
    fastest: str | None,
) -> QualityChoice:
    if fastest is None:
        best = max(filter(found.is_whole, found.measured), key=found.worst_db, default=None)
        message = "no whole measurement" if best is None else (
            f"the closest method, {best}, has {found.worst_db(best):.1f} dB at worst"
        )  # fmt: skip
        return _exact(request, settings, f"held by no measured method with a margin: {message}")
    method = parse_method(fastest)
    sampling = method.sampling
    if sampling is not None:
        sampling = replace(sampling, limit=found.limit(fastest, decibels))
    plan = QualityPlan(
        request.quality,
        fastest,
        "the fastest measured method that holds the budget",
        found.worst_db(fastest),
        found.median_db(fastest),
        len(found.videos),
        found.gain(fastest),
    )
    notes: tuple[str, ...] = ()
    if found.size != size_of(settings):
        frames, height, width = found.size
        notes = (
            f"quality {request.quality}: measured at {width}x{height} and {frames} frames, not at "
            f"this size; `{command_of(request)}` with this size measures it",
        )
    return QualityChoice(replace(settings, method=sampling), plan, notes, method.products)


def size_of(settings: Settings) -> tuple[int, int, int]:
    """Size of a calibration: (num_frames, height, width)."""
    return settings.num_frames, settings.height, settings.width


def _allowed_methods(
    request: Request,
    model: ModelSpec,
    settings: Settings,
    components: Sequence[ComponentPlan],
    device: DeviceFacts,
) -> tuple[str, ...]:
    off = switched_off(request.disable)
    methods = model.sampling_methods(settings) if isinstance(model, LossySpec) else ()
    products = products_of(request, components, device) if has_torchao() else ()
    return (*(each for each in methods if each not in off), *products)


def _why_exact(model: ModelSpec, settings: Settings, allowed: Sequence[str]) -> str | None:
    """Why no budget can be used; None if one can."""
    if isinstance(model, LossySpec) and model.is_distilled:
        return "a distilled model, which has no exact run to be measured against"
    if not allowed:
        return "a model or request for which no lossy method is allowed"
    if settings.num_inference_steps < 3:
        return "a run of too few steps to leave any out"
    return None


def _check(method: SamplingMethod, model: ModelSpec, settings: Settings, request: Request) -> None:
    known = model.sampling_methods(settings) if isinstance(model, LossySpec) else ()
    if method.name not in known:
        can = f"it can do {', '.join(known)}" if known else "it has no lossy methods"
        why = model.why_not(method.name) if isinstance(model, LossySpec) else None
        here = f"here, as {why}" if why else "here"
        raise InputError(f"quality {method}: {model.title} can't do {method.name} {here}; {can}")
    if method.name in switched_off(request.disable):
        raise InputError(f"quality {method}: {method.name} is disabled (--disable)")
    steps = settings.num_inference_steps
    if method.num_computed > steps:
        raise InputError(
            f"quality {method}: {method.num_computed} of {steps} steps can't be computed; "
            + (f"give {steps} or fewer" if steps > 1 else "a single step is always computed")
        )
    if method.has_partial_guidance and not can_guide_partly(model, request):
        suffix = "h" if method.holds_guidance else f"g{method.guided_percent}"
        raise InputError(
            f"quality {method}: guidance in part of the steps works with our own model families, "
            f"on one device; leave out {suffix}"
        )
    if method.holds_guidance and not has_held_guidance(model):
        raise InputError(
            f"quality {method}: {model.title} changes its guidance from step to step; leave out h"
        )


def can_guide_partly(model: ModelSpec, request: Request) -> bool:
    """Whether a method can leave guidance out of the last steps."""
    return isinstance(model, LossySpec) and model.has_partial_guidance and request.num_ranks == 1


def has_held_guidance(model: ModelSpec) -> bool:
    """Whether a method can take what guidance adds from the step before."""
    return isinstance(model, LossySpec) and model.has_held_guidance


def command_of(request: Request) -> str:
    """The command line that calibrates for a request."""
    model = [request.model] if request.model else []
    return shlex.join(["everyframe", "calibrate", *model])


def calibration_key(
    model: ModelSpec,
    settings: Settings,
    components: Sequence[ComponentPlan],
    device: DeviceFacts,
) -> str | None:
    """Key of the calibrations that fit, of any size; None if these weights were never hashed here.

    It has the weights with their LoRAs, steps, guidance and options, the precision of each
    component, and the device with its libraries; not the prompt, seed, size or threads.
    """
    weights = known_digest_with_loras(model)
    if weights is None:
        return None
    general = replace(
        settings, prompt="", negative_prompt=None, seed=0, num_videos=1, method=None, savings=(),
        num_frames=0, height=0, width=0, nominal_size=None, nominal_length=None, own_choices=(),
    )  # fmt: skip
    precisions = [(each.name, str(each.precision)) for each in components]
    return digest(
        [
            weights,
            repr(general),
            settings.negative_prompt is not None,
            precisions,
            device_key(device, 0),
        ]
    )
