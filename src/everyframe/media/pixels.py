"""Pixel arrays: float to 8-bit conversion, range checks, resizing.

Arrays are ``(..., H, W, 3)``, RGB. No file access.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError, MediaError, NumericsError, did_you_mean

Frames = npt.NDArray[np.uint8]

#: Tolerance outside 0..1, for overshoot from resampling and half precision.
_SLACK = 1e-2

_WAYS = ("crop", "pad", "stretch", "cover")


def to_uint8(frames: npt.NDArray[Any], *, first_index: int = 0) -> Frames:
    """Convert frames in 0..1 to uint8, ``round(255 x)``; values outside are clipped.

    The first axis is time for ``(T, H, W, 3)``; an array with fewer axes is one frame. uint8 frames
    are returned unchanged. Raises `NumericsError` for values that are not finite and names the
    first such frame, counted from `first_index`: a cast would silently turn it black. Raises
    `InputError` for other integer dtypes.
    """
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise InputError(f"frames must be uint8 or floats in 0..1, got {frames.dtype}")
    finite = np.isfinite(frames)
    if not finite.all():
        per_frame = finite.reshape(len(frames) if frames.ndim > 3 else 1, -1)
        bad = np.flatnonzero(~per_frame.all(axis=1))
        count = int(per_frame[bad[0]].size - per_frame[bad[0]].sum())
        raise NumericsError(
            f"frame {first_index + int(bad[0])} has {count} values that are not finite"
            f" ({len(bad)} of {len(per_frame)} frames do); nothing of it is written"
        )
    # float16 and float32 go through float32: 255 x is then right to far less than half a level.
    wide = frames.astype(np.promote_types(frames.dtype, np.float32), copy=False)
    pixels: Frames = np.rint(np.clip(wide, 0, 1) * 255).astype(np.uint8)
    return pixels


def check_range(values: npt.NDArray[Any], what: str) -> None:
    """Raise `MediaError` for input floats that are not finite or not in 0..1."""
    if not np.issubdtype(values.dtype, np.floating) or not values.size:
        return
    least, most = float(values.min()), float(values.max())
    if not np.isfinite([least, most]).all():
        raise MediaError(f"{what} holds values that are not finite; give floats in 0..1")
    if least < -_SLACK or most > 1 + _SLACK:
        raise MediaError(
            f"{what} of floats must hold values in 0..1, got {least:.4g} to {most:.4g}; scale them "
            "((x + 1) / 2 for -1..1), or give uint8"
        )


def fit_image(image: Frames, height: int, width: int, how: str = "crop") -> Frames:
    """Resize `image` ``(..., H, W, 3)`` to ``(..., height, width, 3)`` with Lanczos resampling.

    ``crop`` scales to cover the target and cuts the excess evenly; ``pad`` scales to fit inside and
    adds black bars; ``stretch`` changes the proportions; ``cover`` crops as Open-Sora does, after
    bicubic resampling to whole pixels. An image of the right size is returned unchanged.
    """
    if how not in _WAYS:
        hint = did_you_mean(how, _WAYS)
        raise InputError(f"unknown way to fit {how!r}; allowed: {', '.join(_WAYS)}{hint}")
    if image.shape[-3:-1] == (height, width):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    fitted = np.stack([_fit_one(one, height, width, how) for one in flat])
    return fitted.reshape(*image.shape[:-3], height, width, 3)


def _fit_one(image: Frames, height: int, width: int, how: str) -> Frames:
    from PIL import Image

    picture = Image.fromarray(image)
    lanczos = Image.Resampling.LANCZOS
    old_height, old_width = image.shape[:2]
    if how == "stretch":
        return np.asarray(picture.resize((width, height), lanczos))
    if how == "crop":
        # The largest centred box of the target's proportions; its edges may lie between pixels.
        scale = min(old_width / width, old_height / height)
        left, top = (old_width - scale * width) / 2, (old_height - scale * height) / 2
        box = (left, top, old_width - left, old_height - top)
        return np.asarray(picture.resize((width, height), lanczos, box=box))
    if how == "cover":
        return _crop_to_cover(image, height, width)
    scale = min(width / old_width, height / old_height)
    inner = (max(1, round(old_width * scale)), max(1, round(old_height * scale)))
    padded = Image.new("RGB", (width, height))
    padded.paste(
        picture.resize(inner, lanczos), ((width - inner[0]) // 2, (height - inner[1]) // 2)
    )
    return np.asarray(padded)


def _crop_to_cover(image: Frames, height: int, width: int) -> Frames:
    """Cut the middle out of the resized `image`; the rounding is that of Open-Sora's pixels."""
    from PIL import Image

    tall, wide = height / image.shape[0], width / image.shape[1]
    rows, columns = round(image.shape[0] * wide), round(image.shape[1] * tall)
    inner = (height, columns) if tall > wide else (rows, width)
    resized = Image.fromarray(image).resize(inner[::-1], Image.Resampling.BICUBIC)
    top, left = (round((inner[0] - height) / 2), round((inner[1] - width) / 2))
    return np.asarray(resized)[top : top + height, left : left + width]
