"""Call signature of a pipeline class: parameters, defaults, and whether it outputs frames.

Read from the signature of `__call__` for a plain pipeline, and from the inputs and outputs of its
blocks for a modular one. Loads nothing.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args

#: Everyframe option -> names of the same parameter in pipelines, most common first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "height": ("height",),
    "width": ("width",),
    "num_frames": ("num_frames", "video_length", "frames"),
    "fps": ("frame_rate", "fps", "target_fps"),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale",),
    "seed": ("generator",),
    "latents": ("latents",),
    "image": ("image", "cond_image"),
    "last_image": ("last_image",),
}
#: Seed parameter that some pipelines have beside their generator.
OWN_SEED = "seed"
#: Name of the frames in the output of modular blocks.
VIDEO_RESULT = "videos"

_PLAIN: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}

#: Word in a type annotation -> form in which images and arrays are passed.
_FORMS: Mapping[str, str] = {"Image": "pictures", "Tensor": "tensor", "ndarray": "array"}
#: Class of a modular pipeline's condition objects, where its blocks declare no more than a list.
_UNTYPED_RECORDS: Mapping[tuple[str, str], tuple[str, str]] = {
    (f"LTX2{version}ModularPipeline", "conditions"): (
        "diffusers.pipelines.ltx2.pipeline_ltx2_condition", "LTX2VideoCondition"
    )
    for version in ("", "5")
}  # fmt: skip
#: Config key of a distilled modular pipeline (Cosmos 3) with the sigmas of all of its steps.
_FIXED_SIGMAS = "distilled_sigmas"
#: Last words of the names of image parameters without an annotation.
_OF_PICTURES = ("video", "image", "images", "mask", "frames")


@dataclass(frozen=True)
class CallParameter:
    """One parameter of a pipeline's call.

    Attributes:
        name: its name.
        default: its default; None if it has none.
        required: it has no default.
        kinds: plain types that it is declared with; empty if it allows others.
        form: form of images passed to it: ``pictures`` (PIL), ``tensor`` or ``array``; empty if it
            is not an image parameter.
        is_list: a single image is passed as a list, too.
        record: dataclass that it is declared with; None if there is none.
    """

    name: str
    default: Any
    required: bool
    kinds: tuple[type, ...] = ()
    form: str = ""
    is_list: bool = False
    record: type | None = None


@dataclass(frozen=True)
class CallSignature:
    """The call signature of a pipeline class.

    Attributes:
        class_name: the pipeline class.
        parameters: parameters of its call, by name.
        makes_video: its output has frames.
        is_modular: it is a modular pipeline.
        results: names of a modular pipeline's outputs.
        has_fixed_steps: it takes no other number of steps than its default.
    """

    class_name: str
    parameters: Mapping[str, CallParameter]
    makes_video: bool
    is_modular: bool = False
    results: tuple[str, ...] = ()
    has_fixed_steps: bool = False

    def name_of(self, option: str) -> str | None:
        """The pipeline's own name of an Everyframe option; None if it has none."""
        return next((name for name in NAMES[option] if name in self.parameters), None)

    def default_of(self, option: str) -> Any:
        """The pipeline's own default of an Everyframe option; None if it has none."""
        name = self.name_of(option)
        return None if name is None else self.parameters[name].default


def of_class(cls: Any) -> CallSignature:
    """Call signature of a plain pipeline class.

    If a call has ``*args`` or ``**kwargs``, the parameters of the parent class' call are included.
    """
    parameters: dict[str, CallParameter] = {}
    for home in cls.__mro__:
        if "__call__" not in vars(home):
            continue
        signature = inspect.signature(vars(home)["__call__"]).parameters
        has_variadic = False
        for name, each in signature.items():
            if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                has_variadic = True
            elif name != "self" and name not in parameters:
                required = each.default is each.empty
                default = None if required else each.default
                parameters[name] = declared(name, default, required, each.annotation)
        if not has_variadic:
            break
    return CallSignature(cls.__name__, parameters, _gives_frames(cls))


def of_blocks(class_name: str, blocks: Any, config: Mapping[str, Any]) -> CallSignature:
    """Call signature of a modular pipeline, from its blocks and its own config."""
    parameters = {}
    for each in blocks.inputs:
        if each.name is not None:
            # What one workflow can't do without, another makes: nothing is required of all.
            found = declared(each.name, _default(each), False, each.type_hint)
            parameters[each.name] = replace(found, record=_known_record(class_name, found))
    sigmas = config.get(_FIXED_SIGMAS)
    if sigmas:
        steps = parameters["num_inference_steps"]
        parameters[steps.name] = replace(steps, default=len(sigmas))
    results = tuple(str(each.name) for each in blocks.outputs)
    return CallSignature(
        class_name, parameters, VIDEO_RESULT in results, True, results, bool(sigmas)
    )


def declared(name: str, default: Any, required: bool, annotation: Any) -> CallParameter:
    """Describe a parameter by its annotation, or by its name if it has none."""
    kinds, form, text = _kinds(annotation), "", str(annotation)
    if annotation in (None, inspect.Parameter.empty):
        form = "pictures" if name.rpartition("_")[2] in _OF_PICTURES else ""
    else:
        form = next((form for word, form in _FORMS.items() if word in text), "")
    is_list = text.removeprefix("typing.").lower().startswith("list[")
    return CallParameter(name, default, required, kinds, form, is_list, _record(annotation))


def _record(annotation: Any) -> type | None:
    """The dataclass in an annotation, also inside lists or unions."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation
    found = (_record(each) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


def _known_record(class_name: str, parameter: CallParameter) -> type | None:
    """The dataclass of a modular pipeline's parameter, by its annotation or our table."""
    known = _UNTYPED_RECORDS.get((class_name, parameter.name))
    if known is None:
        return parameter.record
    record: type = getattr(importlib.import_module(known[0]), known[1])
    return record


def _default(given: Any) -> Any:
    """A block's default; with one default per workflow, their common value if they agree."""
    by_block = list((getattr(given, "defaults_by_block", None) or {}).values())
    agreed = bool(by_block) and all(each == by_block[0] for each in by_block)
    return by_block[0] if given.default is None and agreed else given.default


def of_pipeline(pipe: Any) -> CallSignature:
    """Call signature of a loaded pipeline, plain or modular."""
    blocks = getattr(pipe, "blocks", None)
    if blocks is not None and hasattr(blocks, "outputs"):
        return of_blocks(type(pipe).__name__, blocks, pipe.config)
    return of_class(type(pipe))


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Plain types of an annotation such as ``float | None``; empty if it allows others."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if not isinstance(annotation, (str, type)):
        text = str(annotation).replace("typing.Optional[", "").rstrip("]")
    words = [word.strip() for word in str(text).split("|")]
    kinds = [_PLAIN[word] for word in words if word in _PLAIN]
    others = [word for word in words if word not in _PLAIN and word not in ("None", "NoneType")]
    return () if others else tuple(kinds)


def _gives_frames(cls: type) -> bool:
    """Whether the module of the class has an output dataclass with frames.

    diffusers annotates no return types. Modules of parent classes count, too.
    """
    homes = [sys.modules[each.__module__] for each in cls.__mro__ if each.__module__ in sys.modules]
    known = [value for home in homes for value in vars(home).values()]
    return any(
        isinstance(each, type)
        and is_dataclass(each)
        and any(field.name in ("frames", "video") for field in fields(each))
        for each in known
    )
