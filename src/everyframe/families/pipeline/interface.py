"""What a pipeline takes and gives, read from its class: parameters, defaults, and whether frames.

For a plain pipeline that is the signature of `__call__`; for a modular one the inputs and outputs
of its blocks. Nothing is loaded. Not here: what a request makes of it (`settle.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

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
    "image": ("image",),
    "last_image": ("last_image",),
}
#: Parameters that say how a pipeline is called and are ours to choose.
OURS = {
    "generator", "output_type", "return_dict", "callback", "callback_steps", "output",
    "callback_on_step_end", "callback_on_step_end_tensor_inputs", "num_videos_per_prompt",
    "num_images_per_prompt",
}  # fmt: skip

#: What modular blocks call the frames that they give.
VIDEO_RESULT = "videos"

_PLAIN: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Parameter:
    """One parameter: `kinds` are the plain types that it is declared to take, none if others."""

    name: str
    default: Any
    required: bool
    kinds: tuple[type, ...] = ()


@dataclass(frozen=True)
class Interface:
    """What a pipeline class takes, by its own names. `results` are a modular one's outputs."""

    class_name: str
    parameters: Mapping[str, Parameter]
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


def of_class(cls: Any) -> Interface:
    """The interface of a plain pipeline class."""
    parameters = {}
    for name, each in inspect.signature(cls.__call__).parameters.items():
        if name == "self" or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        required = each.default is each.empty
        default = None if required else each.default
        parameters[name] = Parameter(name, default, required, _kinds(each.annotation))
    return Interface(cls.__name__, parameters, _gives_frames(cls))


def of_blocks(class_name: str, blocks: Any) -> Interface:
    """The interface of a modular pipeline, from its blocks."""
    parameters = {}
    for each in blocks.inputs:
        if each.name is not None:
            # What one workflow can't do without, another makes: nothing is required of all.
            parameters[each.name] = Parameter(
                each.name, _default(each), False, _kinds(each.type_hint)
            )
    results = tuple(str(each.name) for each in blocks.outputs)
    return Interface(class_name, parameters, VIDEO_RESULT in results, True, results)


def _default(given: Any) -> Any:
    """A block's default; that of all workflows where it is kept by workflow and they agree."""
    by_block = list((getattr(given, "defaults_by_block", None) or {}).values())
    agreed = bool(by_block) and all(each == by_block[0] for each in by_block)
    return by_block[0] if given.default is None and agreed else given.default


def of_pipeline(pipe: Any) -> Interface:
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
