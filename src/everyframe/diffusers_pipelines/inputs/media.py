"""Read media files for a pipeline's own parameters.

On a command line a driving video, a mask or a camera track is given as a file name. The pipeline's
signature (`signature.py`) determines the form it is passed in. In Python the objects themselves may
be given; they are passed on unchanged, and 8-bit frames as Pillow images. The first and last image,
which every request can have, are not handled here but in `image_forms.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.inputs import defaults
from everyframe.diffusers_pipelines.inputs.image_forms import form_of, num_frames_of, sides_of
from everyframe.diffusers_pipelines.inputs.signature import CallParameter, CallSignature, declared
from everyframe.media.input_checks import check_video
from everyframe.media.pixels import Frames, fit_image
from everyframe.media.read import read_image, read_pixels, video_shape

VideoSize = tuple[int | None, int | None, int | None]
"""(frames, height, width)."""

#: What a record has in place of an object, by `settings.plain`.
_OBJECT = re.compile(r"<\w+>")
#: Suffix of array files: a camera track, intrinsics.
_NUMBERS = ".npy"
_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}


def names_files(parameter: CallParameter, value: Any) -> bool:
    """Whether `value` is a file name, or several, for a parameter that needs their content."""
    if not parameter.form:
        return False
    listed = value if isinstance(value, (list, tuple)) else [value]
    return bool(listed) and all(isinstance(each, (str, os.PathLike)) for each in listed)


def media_parameter_names(value: Any) -> Any:
    """The same value for plans and records: each existing path is reduced to its file name."""
    if isinstance(value, Mapping):
        return {str(key): media_parameter_names(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [media_parameter_names(each) for each in value]
    is_path = isinstance(value, (str, os.PathLike)) and os.path.exists(value)
    return Path(value).name if is_path else value


def check(interface: CallSignature, parameter: CallParameter, value: Any) -> None:
    """Raise `InputError` for a missing file, or a condition object with wrong fields."""
    if names_files(parameter, value):
        for each in _as_list(value):
            if _OBJECT.fullmatch(os.fspath(each)):
                raise InputError(
                    f"the video was made with a {parameter.name} given in Python; give it again"
                )
            check_video(each)
        return
    if parameter.record is None:
        return
    for each in _as_list(value):
        if isinstance(each, Mapping):
            _check_record(interface, parameter, each)


def _check_record(
    interface: CallSignature, parameter: CallParameter, given: Mapping[str, Any]
) -> None:
    known = record_fields(parameter)
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; it has {', '.join(known)}"
            raise InputError(
                f"{parameter.name} of {interface.class_name} has no field {name!r}{hint}"
            )
        check(interface, known[name], value)
    lacking = [name for name, each in known.items() if each.required and name not in given]
    if lacking:
        raise InputError(
            f"{parameter.name} of {interface.class_name} can't do without {', '.join(lacking)}"
        )


def record_fields(parameter: CallParameter) -> dict[str, CallParameter]:
    """The fields of the parameter's dataclass, as parameters."""
    assert parameter.record is not None
    found = {}
    for each in fields(parameter.record):
        required = each.default is MISSING and each.default_factory is MISSING
        found[each.name] = declared(each.name, None, required, each.type)
    return found


def as_fields(interface: CallSignature, own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace condition objects by mappings of their fields, from which they can be rebuilt."""

    def recorded(kind: type | None, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [recorded(kind, each) for each in value]
        if kind is None or type(value) is not kind:
            return value
        return {each.name: getattr(value, each.name) for each in fields(kind) if each.init}

    known = interface.parameters
    return {
        name: recorded(known[name].record, value) if name in known and known[name].record else value
        for name, value in own.items()
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def opened(interface: CallSignature, own: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The parameters `own` with every file read, in the form that the pipeline expects.

    Content is passed on unchanged, except that with ``fit`` videos are resized to the output size.
    Images are never resized: they show how something looks and not where it is.
    """
    return {
        name: _open(interface, interface.parameters[name], value, settings)
        for name, value in own.items()
    }


def _open(
    interface: CallSignature, parameter: CallParameter, value: Any, settings: Settings
) -> Any:
    if names_files(parameter, value):
        if isinstance(value, (list, tuple)):
            return [_of_file(interface, parameter, each, settings) for each in value]
        found = _of_file(interface, parameter, value, settings)
        is_alone = parameter.is_list and not isinstance(found, (list, torch.Tensor))
        return [found] if is_alone else found
    if parameter.form == "pictures" and _are_bytes(value):
        # Diffusers takes the numbers of an array for 0..1, whatever their type.
        return in_form(interface, parameter, value)
    if parameter.record is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_open(interface, parameter, each, settings) for each in value]
    if not isinstance(value, Mapping):
        return value
    known = record_fields(parameter)
    return parameter.record(
        **{name: _open(interface, known[name], each, settings) for name, each in value.items()}
    )


def _of_file(
    interface: CallSignature,
    parameter: CallParameter,
    path: str | os.PathLike[str],
    settings: Settings,
) -> Any:
    """The content of one file: an array, an image, or the frames of a video."""
    if Path(path).suffix.lower() == _NUMBERS:
        numbers = np.array(_numbers(path))
        return torch.from_numpy(numbers) if parameter.form == "tensor" else numbers
    is_still = _is_picture(path)
    frames_THWC = read_image(path)[None] if is_still else read_pixels(path)
    if is_still:
        return in_form(interface, parameter, frames_THWC, is_still=True)
    return in_form(interface, parameter, fitted(interface, parameter, frames_THWC, settings))


def fitted(
    interface: CallSignature, parameter: CallParameter, frames_THWC: Frames, settings: Settings
) -> Frames:
    """Frames resized to the output size with ``fit``, else unchanged."""
    keeps_size = parameter.name in (defaults.of(defaults.OWN_SIZE, interface.class_name) or ())
    if settings.fit is None or keeps_size:
        return frames_THWC
    return fit_image(frames_THWC, settings.height, settings.width, settings.fit)


def in_form(
    interface: CallSignature,
    parameter: CallParameter,
    frames_THWC: Frames,
    *,
    is_still: bool = False,
) -> Any:
    """Frames, uint8, as the pipeline expects them."""
    from PIL import Image

    if parameter.form != "pictures":
        video = _tensor(interface, parameter, frames_THWC)
        return video if parameter.form == "tensor" else video.numpy()
    pictures = [Image.fromarray(frame) for frame in frames_THWC]
    if is_still:
        return pictures[0]
    lists = defaults.of(defaults.LISTS_OF_VIDEOS, interface.class_name) or ()
    return [pictures] if parameter.name in lists else pictures


def _are_bytes(value: Any) -> bool:
    """Whether it is the frames of a video, uint8 (T, H, W, 3)."""
    is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
    return is_bytes and value.ndim == 4 and value.shape[-1] == 3


def _is_picture(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() in _PICTURES and Path(path).is_file()


def _numbers(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """The array in a file, memory-mapped, so a header with a false size allocates nothing."""
    try:
        return np.lib.format.open_memmap(os.fspath(path), mode="r")
    except (ValueError, EOFError, OverflowError) as error:
        raise InputError(f"{os.fspath(path)!r} holds no array of numbers: {error}") from error


def _tensor(
    interface: CallSignature, parameter: CallParameter, frames_THWC: Frames
) -> torch.Tensor:
    """(1, ...) floats in 0..1 in the pipeline's axis order.

    A mask has one channel of 0 or 255, as diffusers' own helper makes it.
    """
    video_TCHW = torch.from_numpy(frames_THWC).movedim(-1, 1)
    if parameter.name.startswith("mask"):
        video_TCHW = (video_TCHW.float().mean(1, keepdim=True) >= 127.5) * 255.0
    else:
        video_TCHW = video_TCHW / 255.0
    is_channels_first = defaults.of(defaults.CHANNELS_FIRST, interface.class_name)
    return (video_TCHW.transpose(0, 1) if is_channels_first else video_TCHW)[None]


def size_in(interface: CallSignature, own: Mapping[str, Any]) -> VideoSize | None:
    """(frames, height, width) of the first video among these parameters; None if there is none.

    An entry is None if the video's form does not have it.
    """
    for name, value in own.items():
        parameter = interface.parameters[name]
        if "video" not in name or not parameter.form or value is None:
            continue
        is_file = names_files(parameter, value) and not isinstance(value, (list, tuple))
        if is_file and Path(value).suffix.lower() != _NUMBERS:
            return (1, *read_image(value).shape[:2]) if _is_picture(value) else video_shape(value)
        form = form_of(_numbers(value) if is_file else value)
        return num_frames_of(form), *(sides_of(form) or (None, None))
    return None
