"""The methods that a calibration measures: sampling methods first, then products in eight bits.

Products are measured where their trial on this device certified them: alone, and together with the
sampling methods that were found to be the fastest, as both errors add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from everyframe.core.errors import InputError, MissingPackageError
from everyframe.core.plan import Settings
from everyframe.core.quality import (
    CACHES,
    METHODS,
    LossyMethod,
    SamplingMethod,
    parse_method,
)
from everyframe.core.request import Request
from everyframe.fast_paths.calibrations import Calibration
from everyframe.fast_paths.registry import switched_off
from everyframe.planning.quality import can_guide_partly, has_held_guidance, kinds_of
from everyframe.planning.resolve import prepare
from everyframe.runtime.interface import LossySpec, ModelSpec

#: Budgets, in dB, whose fastest sampling methods are measured with products in eight bits too.
BUDGETS = (30.0, 32.0, 35.0, 37.0, 40.0)

#: Shares of the steps that a method computes, from mild to bold.
SHARES = (2 / 3, 1 / 2, 2 / 5, 1 / 3, 4 / 15, 1 / 5, 1 / 6)

#: Default methods: those of the first entry that the model supports entirely, and every cache it
#: supports. On the models tried, `abm2` beats the other solvers and predicted answers.
USUAL = (("abm2",), ("taylor1", "taylor2"))

#: With guidance in all steps, and in this share of them where a model can do that.
GUIDED = (100, 50)

#: Further placements of the computed steps and shares of guidance, by method: (early, guided,
#: whether guidance is held where a model can do that).
PLACED = {"abm2": ((130, 100, False), (130, 100, True), (130, 50, False), (130, 33, False))}


def candidates(
    request: Request,
    model: ModelSpec,
    settings: Settings,
    methods: Sequence[str] = (),
    products: Sequence[str] = (),
) -> tuple[LossyMethod, ...]:
    """The methods to measure, from mild to bold, without `combinations`.

    Of the names in `methods`, the usual ones by default; `products` may be among them. Raises
    `InputError` if the model can do none.
    """
    can = _supported(request, model, settings)
    # A name with @ or + is a whole method, such as ab2@10; another stands for all steps and shares.
    whole = [parse_method(each) for each in methods if {*"@+"} & {*each}]
    named = [each for each in methods if not {*"@+"} & {*each}]
    known = (*can, *products)
    wrong = {*named} - {*known} | {str(each) for each in whole if not each.names <= {*known}}
    if wrong:
        raise InputError(
            f"{model.title} can't do {', '.join(sorted(wrong))}; it can do {', '.join(known)}"
        )
    named = [each for each in named if each not in products] if methods else _usual(can)
    steps = settings.num_inference_steps
    counts = {max(2, round(steps * share)) for share in SHARES}
    found = [
        LossyMethod(SamplingMethod(name, count, 1, guided, early, holds))
        for count in sorted(counts, reverse=True)
        if count < steps
        for name in named
        for early, guided, holds in _placements(name, request, model, settings)
        if count > 3 or not holds
    ]
    found += whole
    if not found and named:
        raise InputError(f"{steps} steps are too few to leave any out; there is nothing to measure")
    return _from_mild_to_bold(found)


def _supported(request: Request, model: ModelSpec, settings: Settings) -> tuple[str, ...]:
    """Names of the sampling methods that the model can do and the request does not disable."""
    if isinstance(model, LossySpec) and model.is_distilled:
        raise InputError(f"{model.title} is distilled: there is no exact run to measure against")
    names = model.sampling_methods(settings) if isinstance(model, LossySpec) else ()
    found = tuple(name for name in names if name not in switched_off(request.disable))
    if not found:
        raise InputError(f"{model.title} has no lossy methods that could be measured")
    return found


def _usual(can: Sequence[str]) -> list[str]:
    """The default methods of a model that can do these."""
    solvers = next((names for names in USUAL if {*names} <= {*can}), can)
    return [*solvers, *(each for each in CACHES if each in can and each not in solvers)]


def _placements(
    name: str, request: Request, model: ModelSpec, settings: Settings
) -> list[tuple[int, int, bool]]:
    """Each (early, guided, whether guidance is held) of a method that this request can use."""
    is_guided = settings.guidance_scale > 1 and can_guide_partly(model, request)
    found = [*((100, share, False) for share in GUIDED), *PLACED.get(name, ())]
    return [
        (early, share, holds)
        for early, share, holds in found
        if is_guided or (share == 100 and not holds)
        if has_held_guidance(model) or not holds
    ]


def combinations(found: Calibration, kind: str, request: Request) -> tuple[LossyMethod, ...]:
    """Products of a kind alone, and with the sampling methods that are the fastest of a budget."""
    allowed = METHODS.keys() - switched_off(request.disable)
    fastest = {found.fastest(decibels, [*allowed]) for decibels in BUDGETS}
    methods = [replace(parse_method(each), products=kind) for each in sorted(filter(None, fastest))]
    return _from_mild_to_bold([LossyMethod(None, kind), *methods])


def _from_mild_to_bold(methods: Sequence[LossyMethod]) -> tuple[LossyMethod, ...]:
    return tuple(sorted(methods, key=lambda each: -each.num_computed))


def why_not_certified(kind: str, request: Request) -> str | None:
    """Why products of a kind can't be measured for a request; None if they are certified here.

    Tries them, unless that was done before.
    """
    asked = Request(**{**request.given(), "quantize": kind})
    try:
        components = prepare(asked, may_fetch=True, will_run=True).plan.components
    except (InputError, MissingPackageError) as error:
        return str(error)
    if kind in kinds_of(components):
        return None
    choices = [each for component in components for each in component.choices if each.path == kind]
    return "; ".join(dict.fromkeys(f"{each.verdict}, {each.reason}" for each in choices))
