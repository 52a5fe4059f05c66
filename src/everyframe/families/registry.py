"""Registry of model families, imported lazily: this module imports no family and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.runtime.interface import Family, ModelSpec, Stage

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext

#: Family name -> (module and class of its options, module and name of the family object).
_FAMILIES = {
    # Before the other Open-Sora, which refuses folders with several checkpoints.
    "opensora2": (
        ("everyframe.families.opensora2.options", "OpenSora2Options"),
        ("everyframe.families.opensora2.family", "OPEN_SORA_2"),
    ),
    "opensora": (
        ("everyframe.families.opensora.options", "OpenSoraOptions"),
        ("everyframe.families.opensora.family", "OPEN_SORA"),
    ),
    "svd": (
        ("everyframe.families.svd.options", "SVDOptions"),
        ("everyframe.families.svd.family", "SVD"),
    ),
    "inpaint": (
        ("everyframe.families.inpaint.options", "InpaintOptions"),
        ("everyframe.families.inpaint.family", "INPAINT"),
    ),
    "stepvideo": (
        ("everyframe.families.stepvideo.options", "StepVideoOptions"),
        ("everyframe.families.stepvideo.family", "STEP_VIDEO"),
    ),
    # Last: it accepts every diffusers video folder that no other family does.
    "pipeline": (
        ("everyframe.diffusers_pipelines.inputs.options", "PipelineOptions"),
        ("everyframe.diffusers_pipelines.family", "PIPELINE"),
    ),
}


def family_names() -> tuple[str, ...]:
    """Names of all families."""
    return tuple(_FAMILIES)


def options_of(name: str) -> type[FamilyOptions]:
    """Options class of a family, without importing the family's modules."""
    module, attribute = _FAMILIES[name][0]
    options: type[FamilyOptions] = getattr(import_module(module), attribute)
    return options


def all_options() -> dict[str, type[FamilyOptions]]:
    """Options class of every family, by family name."""
    return {name: options_of(name) for name in _FAMILIES}


def family(name: str) -> Family:
    """Family object by name."""
    module, attribute = _FAMILIES[name][1]
    found: Family = getattr(import_module(module), attribute)
    return found


def stages_of(
    spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext | None = None
) -> Sequence[Stage]:
    """Stages of one clip, for one rank of `parallel` or for a single rank."""
    from everyframe.parallel.communicator import ONE

    return family(plan.family).stages(spec, plan, clip, parallel or ONE)


def check_option_names(request: Request) -> None:
    """Raise `InputError` for an option that no family has, naming the closest known one."""
    known = set(Request.model_fields) - {"family_options"}
    for options in all_options().values():
        known |= set(options.model_fields)
    for name in request.family_options:
        if name not in known:
            raise InputError(f"there is no option {name!r}{did_you_mean(name, known)}")


def family_options(name: str, request: Request) -> FamilyOptions:
    """Parse the request's family options for this family; another family's option is an error."""
    own = options_of(name)
    for given in request.family_options:
        if given not in own.model_fields:
            owner = next(
                other for other, options in all_options().items() if given in options.model_fields
            )
            raise InputError(f"{given} is an option of {owner} models; this is a model of {name}")
    return own(**request.family_options)
