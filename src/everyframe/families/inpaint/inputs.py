"""Inputs of inpainting: source frames, a mask for each, and control images.

Stages read the frames one by one, each time that they need them; none is cached. A source is fitted
to the requested size, if there is one, and padded to whole latents; the result is cropped back.
Masks are 8-bit grey, 255 where the image is repainted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError
from everyframe.families.inpaint.options import InpaintOptions, is_box, is_built_in, split_controls
from everyframe.media.canny import HIGH, LOW, canny
from everyframe.media.frame_source import FrameSource, open_frames, survey
from everyframe.media.pixels import Frames, fit_image

if TYPE_CHECKING:
    from everyframe.media.audio import Audio

Grey = npt.NDArray[np.uint8]

#: Mask pixels with this grey value or more are repainted: half of white, as in diffusers.
WHITE = 128


@dataclass(frozen=True)
class Box:
    """Rectangle in pixels of the source; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    def __str__(self) -> str:
        return f"{self.left},{self.top},{self.right},{self.bottom}"

    def drawn(self, height: int, width: int) -> Frames:
        """Draw white on black, (H, W, 3)."""
        mask = np.zeros((height, width, 3), np.uint8)
        mask[self.top : self.bottom, self.left : self.right] = 255
        return mask


@dataclass(frozen=True)
class Geometry:
    """Working size of frames: fitted to (height, width), padded to multiples of `step`."""

    height: int
    width: int
    fit: str
    step: int

    @property
    def padded(self) -> tuple[int, int]:
        """Padded (height, width), the working size."""
        return -(-self.height // self.step) * self.step, -(-self.width // self.step) * self.step

    def picture(self, frame: Frames) -> Frames:
        """Fit a source frame (H, W, 3) to the result's size."""
        return fit_image(frame, self.height, self.width, self.fit)

    def mask(self, frame: Frames) -> Grey:
        """Fit a mask frame (H, W, 3) to the result's size: (height, width)."""
        return grey(self.picture(frame))

    def pad(self, frame: npt.NDArray[Any], *, with_edge: bool = True) -> npt.NDArray[Any]:
        """Pad (height, width, ...) right and bottom, with edge values or zeros."""
        rows, columns = (new - old for new, old in zip(self.padded, frame.shape, strict=False))
        if not rows and not columns:
            return frame
        around = ((0, rows), (0, columns), *[(0, 0)] * (frame.ndim - 2))
        return np.pad(frame, around, mode="edge" if with_edge else "constant")


@dataclass(frozen=True)
class Inputs:
    """All inputs of a request, opened but not read."""

    source: FrameSource
    mask: FrameSource | Box
    controls: tuple[FrameSource | str, ...]
    canny_thresholds: tuple[float, float] = (LOW, HIGH)

    def frames(self, geometry: Geometry, num_frames: int) -> Iterator[tuple[Frames, Grey]]:
        """Yield source frames and their masks at the result's size, not padded."""
        masks = _stretch(self.mask, self.source, num_frames)
        for frame, mask in zip(_first(self.source, num_frames), masks, strict=True):
            yield geometry.picture(frame), geometry.mask(mask)

    def num_painted(self, geometry: Geometry, num_frames: int) -> int:
        """Number of frames with a non-empty mask at the result's size."""
        if isinstance(self.mask, Box) or self.mask.is_still:
            ((_, mask),) = self.frames(geometry, 1)
            return num_frames if mask.any() else 0
        masks = _repeat(self.mask, num_frames)
        return sum(bool(geometry.mask(mask).any()) for mask in masks)

    def audio(self, num_frames: int) -> Audio | None:
        """Audio of the source's first frames; None if it has none."""
        if self.source.fps is None:
            return None
        return self.source.audio(float(num_frames / self.source.fps))

    def control_pictures(
        self, geometry: Geometry, num_frames: int
    ) -> Iterator[tuple[npt.NDArray[np.float32], ...]]:
        """Yield for each frame the control image of each ControlNet: float32 (H, W, 3), padded."""
        made_here = any(isinstance(control, str) for control in self.controls)
        pairs: Iterator[Any] = self.frames(geometry, num_frames) if made_here else repeat(None)
        given = [
            repeat(None) if isinstance(control, str) else _repeat(control, num_frames)
            for control in self.controls
        ]
        size = next(self.source.read()).shape[:2]
        for _, pair, *seen in zip(range(num_frames), pairs, *given, strict=False):
            yield tuple(
                self._built_in(control, pair, geometry)
                if isinstance(control, str)
                else _as_control(frame, size, geometry)
                for control, frame in zip(self.controls, seen, strict=True)
            )

    def _built_in(
        self, name: str, pair: tuple[Frames, Grey], geometry: Geometry
    ) -> npt.NDArray[np.float32]:
        frame, mask = pair
        if name == "canny":
            edges = canny(frame, *self.canny_thresholds)
            return _in_unit(np.repeat(geometry.pad(edges)[..., None], 3, axis=-1))
        # As the inpainting ControlNet was trained: the source, and -1 under the mask.
        picture = _in_unit(geometry.pad(frame))
        picture[geometry.pad(mask, with_edge=False) >= WHITE] = -1
        return picture


def grey(frame: Frames) -> Grey:
    """Luminance (..., H, W) of (..., H, W, 3): ITU-R 601, rounded like Pillow."""
    wide = frame.astype(np.uint32)
    sums = wide[..., 0] * 19595 + wide[..., 1] * 38470 + wide[..., 2] * 7471
    return ((sums + 0x8000) >> 16).astype(np.uint8)


def open_inputs(options: InpaintOptions, picture: Any) -> Inputs:
    """Open the inputs of a request; `picture` is the common option ``image`` or None.

    Raises `InputError` for a missing input or an unsupported kind.
    """
    given = options.source if picture is None else picture
    options.check_named()
    controls = tuple(_control(each) for each in split_controls(options.control))
    return Inputs(
        source=open_frames(given, what="source"),
        mask=_mask(options.mask),
        controls=controls,
        canny_thresholds=(
            LOW if options.canny_low is None else options.canny_low,
            HIGH if options.canny_high is None else options.canny_high,
        ),
    )


def check_mask(inputs: Inputs, num_frames: int, height: int, width: int) -> None:
    """Raise `InputError` unless the mask fits a source of that length and size."""
    if isinstance(inputs.mask, Box):
        _check_box(inputs.mask, height, width)
        return
    any_white = False

    def look(number: int, frame: Frames) -> None:
        nonlocal any_white
        any_white = any_white or bool((grey(frame) >= WHITE).any())

    found = survey(inputs.mask, "mask", look)
    if (found.height, found.width) != (height, width):
        raise InputError(
            f"the mask is {found.width}x{found.height} and the source {width}x{height}; they must "
            "be of the same size"
        )
    if not inputs.mask.is_still and found.num_frames != num_frames:
        raise InputError(
            f"the mask has {found.num_frames} frames and the source {num_frames}; give one for "
            "each, or one picture for all"
        )
    if not any_white:
        raise InputError(
            "the mask is empty: none of its pixels is white (128 of 255 or more), and white is "
            "what is repainted"
        )


def check_controls(inputs: Inputs, num_frames: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, height and width of each given control; `InputError` for a wrong length."""
    for control in inputs.controls:
        if isinstance(control, str):
            continue
        found = survey(control, "control")
        if not control.is_still and found.num_frames != num_frames:
            raise InputError(
                f"control {control.name!r} has {found.num_frames} frames and the source "
                f"{num_frames}; give one for each, or one picture for all"
            )
        yield control.name, found.height, found.width


def _check_box(box: Box, height: int, width: int) -> None:
    if box.left >= box.right or box.top >= box.bottom:
        raise InputError(
            f"the box {box} is empty: right must be more than left and bottom more than top "
            "(LEFT,TOP,RIGHT,BOTTOM)"
        )
    if box.left < 0 or box.top < 0 or box.right > width or box.bottom > height:
        raise InputError(
            f"the box {box} reaches out of the source, which is {width}x{height}; left and top "
            f"are at least 0, right at most {width}, bottom at most {height}"
        )


def _mask(given: Any) -> FrameSource | Box:
    if is_box(given):
        given = given.split(",")
    is_row = isinstance(given, (list, tuple)) and all(
        isinstance(each, (str, int, float)) for each in given
    )
    if is_row and not any(isinstance(each, str) and Path(each).exists() for each in given):
        return _box(given)
    if isinstance(given, np.ndarray):
        given = given.astype(np.uint8) * 255 if given.dtype == bool else given
        # (T, H, W): a mask has no colours.
        given = given[..., None] if given.ndim == 3 and given.shape[-1] not in (1, 3, 4) else given
    return open_frames(given, what="mask", under="black")


def _box(given: Sequence[Any]) -> Box:
    try:
        numbers = [int(each) for each in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 4 or any(float(each) != int(each) for each in given):
        shown = ",".join(str(each) for each in given)
        raise InputError(
            f"a box is LEFT,TOP,RIGHT,BOTTOM in whole pixels, such as 40,30,160,110, got {shown!r}"
        )
    return Box(*numbers)


def _control(given: Any) -> FrameSource | str:
    if is_built_in(given):
        return str(given).casefold()
    return open_frames(given, what="control")


def _first(source: FrameSource, num_frames: int) -> Iterator[Frames]:
    for _, frame in zip(range(num_frames), source.read(), strict=False):
        yield frame


def _repeat(source: FrameSource, num_frames: int) -> Iterator[Frames]:
    if source.is_still:
        return repeat(next(source.read()), num_frames)
    return _first(source, num_frames)


def _stretch(mask: FrameSource | Box, source: FrameSource, num_frames: int) -> Iterator[Frames]:
    if isinstance(mask, Box):
        height, width = next(source.read()).shape[:2]
        return repeat(mask.drawn(height, width), num_frames)
    return _repeat(mask, num_frames)


def _as_control(
    frame: Frames, size: tuple[int, ...], geometry: Geometry
) -> npt.NDArray[np.float32]:
    """Stretch a given control over the source's (height, width), then fit it like the source.

    Another aspect ratio is stretched to the source's, as diffusers does: once, to the result's
    size, if the source is stretched too.
    """
    if geometry.fit != "stretch" and frame.shape[0] * size[1] != frame.shape[1] * size[0]:
        frame = fit_image(frame, size[0], size[1], "stretch")
    return _in_unit(geometry.pad(geometry.picture(frame)))


def _in_unit(pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Convert 8-bit values to floats in 0..1."""
    unit: npt.NDArray[np.float32] = np.divide(pixels, 255, dtype=np.float32)
    return unit
