"""What a pipeline takes and gives, read from its class: parameters, defaults, and whether frames.

For a plain pipeline that is the signature of `__call__`; for a modular one the inputs and outputs
of its blocks. Nothing is loaded. Not here: what a request makes of it (`settings.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

#: Our option -> the names that pipelines have for it, most common first.
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
#: What some pipelines seed noise of theirs with, beside their generator.
OWN_SEED = "seed"
#: What modular blocks call the frames that they give.
VIDEO_RESULT = "videos"

_PLAIN: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}

#: Words of an annotation, and the form in which pictures and numbers are handed over to it.
_FORMS: Mapping[str, str] = {"Image": "pictures", "Tensor": "tensor", "ndarray": "array"}
#: How what takes pictures is called, where nothing is declared.
_OF_PICTURES = ("video", "image", "images", "mask", "frames")


@dataclass(frozen=True)
class CallParameter:
    """One parameter: `kinds` are the plain types that it is declared to take, none if others.

    `form` is how pictures are handed to it: ``pictures``, Pillow's, or ``tensor`` or ``array``;
    empty where it takes none. It `is_list` where one alone is a list too. `record` is the dataclass
    that it is declared to take, if any.
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
    """What a pipeline class takes, by its own names. `results` are a modular one's outputs."""

    class_name: str
    parameters: Mapping[str, CallParameter]
    makes_video: bool
    is_modular: bool = False
    results: tuple[str, ...] = ()

    def name_of(self, option: str) -> str | None:
        """The pipeline's own name of one of our options; None if it has none."""
        return next((name for name in NAMES[option] if name in self.parameters), None)

    def default_of(self, option: str) -> Any:
        """The pipeline's own default of one of our options, None if it has none."""
        name = self.name_of(option)
        return None if name is None else self.parameters[name].default


def of_class(cls: Any) -> CallSignature:
    """The interface of a plain pipeline class.

    What a call takes as ``*args`` or ``**kwargs`` goes on to that of the class which it is made
    from, whose parameters are then its own too.
    """
    parameters: dict[str, CallParameter] = {}
    for home in cls.__mro__:
        if "__call__" not in vars(home):
            continue
        signature = inspect.signature(vars(home)["__call__"]).parameters
        goes_on = False
        for name, each in signature.items():
            if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                goes_on = True
            elif name != "self" and name not in parameters:
                required = each.default is each.empty
                default = None if required else each.default
                parameters[name] = declared(name, default, required, each.annotation)
        if not goes_on:
            break
    return CallSignature(cls.__name__, parameters, _gives_frames(cls))


def of_blocks(class_name: str, blocks: Any) -> CallSignature:
    """The interface of a modular pipeline, from its blocks."""
    parameters = {}
    for each in blocks.inputs:
        if each.name is not None:
            # What one workflow can't do without, another makes: nothing is required of all.
            parameters[each.name] = declared(each.name, _default(each), False, each.type_hint)
    results = tuple(str(each.name) for each in blocks.outputs)
    return CallSignature(class_name, parameters, VIDEO_RESULT in results, True, results)


def declared(name: str, default: Any, required: bool, annotation: Any) -> CallParameter:
    """A parameter by what its annotation says; by its name where there is none."""
    kinds, form, text = _kinds(annotation), "", str(annotation)
    if annotation in (None, inspect.Parameter.empty):
        form = "pictures" if name.rpartition("_")[2] in _OF_PICTURES else ""
    else:
        form = next((form for word, form in _FORMS.items() if word in text), "")
    is_list = text.removeprefix("typing.").lower().startswith("list[")
    return CallParameter(name, default, required, kinds, form, is_list, _record(annotation))


def _record(annotation: Any) -> type | None:
    """The dataclass that an annotation names, alone or in lists of it."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation
    found = (_record(each) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


def _default(given: Any) -> Any:
    """A block's default; that of all workflows where it is kept by workflow and they agree."""
    by_block = list((getattr(given, "defaults_by_block", None) or {}).values())
    agreed = bool(by_block) and all(each == by_block[0] for each in by_block)
    return by_block[0] if given.default is None and agreed else given.default


def of_pipeline(pipe: Any) -> CallSignature:
    """The interface of a loaded pipeline, plain or modular."""
    blocks = getattr(pipe, "blocks", None)
    if blocks is not None and hasattr(blocks, "outputs"):
        return of_blocks(type(pipe).__name__, blocks)
    return of_class(type(pipe))


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The plain types of an annotation such as ``float | None``; empty if it allows others."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if not isinstance(annotation, (str, type)):
        text = str(annotation).replace("typing.Optional[", "").rstrip("]")
    words = [word.strip() for word in str(text).split("|")]
    kinds = [_PLAIN[word] for word in words if word in _PLAIN]
    others = [word for word in words if word not in _PLAIN and word not in ("None", "NoneType")]
    return () if others else tuple(kinds)


def _gives_frames(cls: type) -> bool:
    """Whether an output class that its module knows has frames: diffusers declares no returns.

    Its module, or that of a class that it is made from.
    """
    homes = [sys.modules[each.__module__] for each in cls.__mro__ if each.__module__ in sys.modules]
    known = [value for home in homes for value in vars(home).values()]
    return any(
        isinstance(each, type)
        and is_dataclass(each)
        and any(field.name in ("frames", "video") for field in fields(each))
        for each in known
    )
