"""Forms of images and videos that are passed on unchanged: PIL images, tensors, arrays, lists.

A form is plain data: ``("picture", height, width)``, ``("tensor" or "array", shape, dtype)``,
``("list", forms)`` or ``("other", class name)``. The plan stores it, and the dry run builds a blank
input from it. `media.py` reads files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from everyframe.core.errors import EveryframeError, MediaError, first_line
from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.media.read import is_picture_of_integers, read_image
from everyframe.precision.dtypes import dtype_name

Form = tuple[Any, ...]
_Result = TypeVar("_Result")

#: Errors with which a pipeline may refuse its input.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)


def form_of(value: Any) -> Form:
    """Form of an image or video; a file has the form of its content.

    Raises:
        MediaError: a file that is not an image.
    """
    if isinstance(value, (str, os.PathLike)) or is_picture_of_integers(value):
        height, width = read_image(value).shape[:2]
        return ("picture", height, width)
    if isinstance(value, Image.Image):
        return ("picture", value.height, value.width)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return (kind, tuple(value.shape), dtype_name(value.dtype))
    if isinstance(value, (list, tuple)):
        return ("list", tuple(form_of(each) for each in value))
    return ("other", type(value).__name__)


def blank(form: Form, height: int, width: int) -> Any:
    """A blank input of that form; of the given size if the form has none."""
    kind, *rest = form
    if kind == "list":
        return [blank(each, height, width) for each in rest[0]]
    if kind == "tensor":
        return torch.zeros(rest[0], dtype=getattr(torch, rest[1]))
    if kind == "array" and not _is_one_picture(rest[0]):
        return np.zeros(rest[0], rest[1])
    sides = sides_of(form) or (height, width)
    return Image.new("RGB", (sides[1], sides[0]))


def _is_one_picture(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4))


def sides_of(form: Form) -> tuple[int, int] | None:
    """(height, width) in pixels; None if the form has no size."""
    kind, *rest = form
    if kind == "picture":
        return rest[0], rest[1]
    if kind == "list":
        return sides_of(rest[0][0]) if rest[0] else None
    if kind not in ("tensor", "array") or len(rest[0]) < 2:
        return None
    shape = rest[0]
    is_channels_last = kind == "array" and len(shape) > 2 and shape[-1] in (1, 3, 4)
    height, width = shape[-3:-1] if is_channels_last else shape[-2:]
    return int(height), int(width)


def num_frames_of(form: Form) -> int | None:
    """Frames of a video; None if the form has no frame count.

    Videos are lists of images, arrays (T, H, W, C) and tensors (T, C, H, W), (B, T, C, H, W) or
    (B, C, T, H, W). A list may also hold whole videos, one for each generated video.
    """
    kind, *rest = form
    if kind == "list":
        first = rest[0][0] if rest[0] else None
        is_nested = first is not None and (first[0] == "list" or _dims(first) >= 4)
        return num_frames_of(first) if first is not None and is_nested else len(rest[0]) or None
    if kind not in ("tensor", "array") or len(rest[0]) not in (4, 5):
        return None
    shape = rest[0]
    if len(shape) == 4:
        return int(shape[0])
    is_channels_first = kind == "tensor" and shape[1] in (1, 3, 4) and shape[2] not in (1, 3, 4)
    return int(shape[2] if is_channels_first else shape[1])


def _dims(form: Form) -> int:
    return len(form[1]) if form[0] in ("tensor", "array") else 0


def plain(value: Any) -> Any:
    """Convert an image, or each of a list, to 8-bit RGB; anything else is returned unchanged.

    Tensors and arrays with values outside 0..1 are not images.
    """
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Image.Image) and value.mode == "RGB":
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)) and not (0 <= value.min() <= value.max() <= 1):
        return value
    try:
        return Image.fromarray(read_image(value))
    except MediaError:
        return value


def to_rgb(pictures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert PIL images of other modes to RGB; everything else is unchanged."""
    return {
        name: plain(value) if isinstance(value, Image.Image) else value
        for name, value in pictures.items()
    }


def call_with_pictures(
    call: Callable[[], _Result],
    as_plain: Callable[[Mapping[str, Any]], _Result],
    given: Mapping[str, Any],
    has_begun: Callable[[], bool],
    on_note: Callable[[str], None],
) -> _Result:
    """Run ``call()``; if it refuses its input before the first step, retry with RGB images.

    diffusers accepts no grey and no transparent images, and some pipelines no arrays. ``as_plain``
    makes the call with RGB images instead. If both fail, the first error is raised.
    """
    try:
        return call()
    except _REFUSALS as error:
        if has_begun() or not given or _is_ours(error):
            raise
        changed = {name: plain(value) for name, value in given.items()}
        if not any(_differs(changed[name], value) for name, value in given.items()):
            raise
        try:
            made = as_plain(changed)
        except _REFUSALS as again:
            if has_begun() or _is_ours(again):
                raise
            raise error from again
        why, names = first_line(error), " and ".join(given)
        on_note(f"the pipeline can't take {names} as given ({why}); it has RGB instead")
        return made


def _is_ours(error: Exception) -> bool:
    """Whether the error is unrelated to images and must propagate."""
    return isinstance(error, EveryframeError) or is_device_loss(error) or is_out_of_memory(error)


def _differs(changed: Any, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_differs(*pair) for pair in zip(changed, value, strict=True))
    return changed is not value
