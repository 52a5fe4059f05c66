"""Read the input images, videos and initial noise of a request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.media.output_path import exact_fps, sidecar_of
from everyframe.media.pixels import check_range, fit_image, to_uint8
from everyframe.media.read import picture_as_given, read_image, read_video, video_as_given
from everyframe.media.video import Video
from everyframe.runtime.interface import ConditioningFrames

#: Maximum frames read of a video to extend; all of them are part of the result.
_MAX_SOURCE_FRAMES = 20_000


def read_given(request: Request, settings: Settings) -> ConditioningFrames:
    """Read the conditioning frames of a request; fit them to the size unless the family does that.

    Files that a diffusers pipeline takes unchanged are only opened.

    Raises:
        MediaError: a file is not an image or video.
    """
    as_given = {
        name: (video_as_given if name == "extend" else picture_as_given)(getattr(request, name))
        for name, _ in settings.given_forms
    }

    def picture(source: Any) -> np.ndarray[Any, Any]:
        return _fit(read_image(source), settings)[None]

    fitted = {
        name: picture(given)
        for name in ("image", "last_image")
        if name not in as_given and (given := getattr(request, name)) is not None
    }
    source: np.ndarray[Any, Any] | None = None
    notes: tuple[str, ...] = ()
    if request.extend is not None and "extend" not in as_given:
        source, notes = _source(request.extend, settings)
    return ConditioningFrames(
        notes=notes,
        first=fitted.get("image"),
        last=fitted.get("last_image"),
        source=source,
        as_given=as_given,
    )


def _fit(picture: np.ndarray[Any, Any], settings: Settings) -> np.ndarray[Any, Any]:
    size = settings.height, settings.width
    if settings.fit is None or picture.shape[:2] == size:
        return picture
    # As in Open-Sora: to the named size, which latents crop to a multiple of 8.
    fitted = fit_image(picture, *settings.conditioned_size, settings.fit)
    return fitted[: size[0], : size[1]]


def _source(extend: Any, settings: Settings) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """The video to extend, fitted to the size, and notes about its frame rate."""
    fps = rate = exact_fps(settings.fps)
    if isinstance(extend, Video):
        check_range(extend.frames, "extend")
        frames, rate = to_uint8(extend.frames), extend.fps
    elif isinstance(extend, np.ndarray):
        if extend.ndim != 4 or extend.shape[-1] != 3 or not extend.size:
            raise InputError(f"extend must be frames (T, H, W, 3), got {extend.shape}")
        check_range(extend, "extend")
        frames = to_uint8(extend)
    elif not isinstance(extend, (str, os.PathLike)):
        raise InputError(
            "extend must be a path, an array of frames (T, H, W, 3) or a Video, "
            f"got {type(extend).__name__}"
        )
    else:
        # Pictures in a folder have no rate; the result's is used.
        bare = Path(extend).is_dir() and not sidecar_of(f"{extend}/").is_file()
        size = (settings.height, settings.width)
        frames, rate = read_video(extend, fps=fps if bare else None, size=size)
    if len(frames) > _MAX_SOURCE_FRAMES:
        raise InputError(
            f"the video to extend has {len(frames)} frames, at most {_MAX_SOURCE_FRAMES} are read"
        )
    notes: tuple[str, ...] = ()
    if rate != fps:
        notes = (
            f"the given video has {float(rate):g} frames a second and the result {float(fps):g}, "
            f"so it will not play at its own speed; --fps {float(rate):g} keeps that",
        )
    return fit_image(frames, settings.height, settings.width), notes


def start_noise(request: Request) -> torch.Tensor | None:
    """Initial noise given in place of the seed's, as float32 on the CPU; None if not given.

    Raises:
        InputError: the noise is not of real numbers, or not finite.
    """
    if request.latents is None:
        return None
    latents = request.latents
    if isinstance(latents, np.ndarray) and not (
        latents.dtype.isnative and all(stride >= 0 for stride in latents.strides)
    ):
        # Flipped, or in another byte order: torch takes neither.
        latents = np.ascontiguousarray(latents, latents.dtype.newbyteorder("="))
    try:
        given = torch.as_tensor(latents)
    except TypeError:  # numpy's objects and texts, which torch has no type for
        given = None
    is_sparse = given is not None and given.layout != torch.strided
    if given is None or is_sparse or given.is_complex() or given.is_meta or given.is_quantized:
        kind = getattr(latents, "layout" if is_sparse else "dtype", type(latents).__name__)
        raise InputError(f"latents must be real numbers in memory, got {kind}")
    noise = given.to("cpu", torch.float32)
    if not torch.isfinite(noise).all():
        raise InputError("latents hold values that are not finite")
    return noise
