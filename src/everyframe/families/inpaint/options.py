"""Options of the ControlNet inpainting family. No torch here.

Names and defaults are those of diffusers' `StableDiffusionControlNetInpaintPipeline`, where it has
them.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from everyframe.core.errors import MediaError
from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import (
    fit_option,
    source_option,
    strength_option,
    truncate_prompt_option,
)

#: Controls that are computed from the source.
BUILT_IN = ("canny", "inpaint")

_BOX = re.compile(r"\s*-?[\d.]+\s*(,\s*-?[\d.]+\s*)+")

_FILES = "; give a picture, a folder, a video, or"


def is_box(given: Any) -> bool:
    """Whether a mask is a box (numbers with commas) and no file has that name."""
    return isinstance(given, str) and not _is_there(given) and _BOX.fullmatch(given) is not None


def is_built_in(given: Any) -> bool:
    """Whether a control is computed from the source."""
    return isinstance(given, str) and given.casefold() in BUILT_IN


def split_controls(given: Any) -> list[Any]:
    """Split a `control` value into one per ControlNet: a list's, or at commas.

    A text with commas that names an existing file is one control.
    """
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, str) and "," in given and not _is_there(given):
        return [part.strip() for part in given.split(",")]
    return [given]


def _check(what: str, given: Any, instead: str) -> None:
    if isinstance(given, (str, os.PathLike)) and not _is_there(given):
        raise MediaError(f"{what}: {os.fspath(given)!r} does not exist{instead}")


def _is_there(given: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.expanduser(given))


def _split(value: Any) -> Any:
    """Parse ``"0.5,0.8"`` from a command line as two numbers."""
    return tuple(value.split(",")) if isinstance(value, str) and "," in value else value


#: One number for all ControlNets, or one for each.
OneOrEach = Annotated[float | tuple[float, ...], BeforeValidator(_split)]


class InpaintOptions(FamilyOptions):
    """Options of inpainting: source, mask, ControlNets and strength."""

    source: Any = source_option()
    mask: Any = option(
        "What to repaint: white in an image, folder or video of the source's size, or a box "
        "LEFT,TOP,RIGHT,BOTTOM in pixels.",
        names_files=True,
    )
    controlnet: Any = option(
        "Folder, hub id or short name (canny, inpaint, depth, …) of the ControlNet, if it is not "
        "in the model's folder; several with commas.",
        names_model=True,
    )
    control: Any = option(
        "What the ControlNet sees: an image, folder or video, or canny or inpaint, which are made "
        "from the source; with commas for several ControlNets.",
        names_files=True,
    )
    strength: float | None = strength_option()
    controlnet_conditioning_scale: OneOrEach = option(
        "How strongly the ControlNet steers; with commas for several.", default=0.5
    )
    control_guidance_start: OneOrEach = option(
        "Share of the steps after which the ControlNet begins to steer.", default=0.0
    )
    control_guidance_end: OneOrEach = option(
        "Share of the steps after which it stops.", default=1.0
    )
    guess_mode: bool = option(
        "Apply the ControlNet to the prompt's branch of guidance only.", default=False
    )
    canny_low: float | None = option(
        "Lower threshold of canny, 100 by default: edges above it that touch a strong edge.",
        ge=0,
        le=10_000,
    )
    canny_high: float | None = option(
        "Upper threshold of canny, 200 by default: edges above it are strong.", ge=0, le=10_000
    )
    frames_at_once: int = option(
        "Frames denoised and decoded together; more need more memory.", default=1, gt=0, le=1000
    )
    fit: str | None = fit_option()
    unblended: bool = option(
        "Return the decoder's output outside the mask too, as diffusers does, and not the source.",
        default=False,
    )
    truncate_prompt: bool = truncate_prompt_option()

    def check_named(self) -> None:
        """Raise `MediaError` if the source, mask or a control does not exist."""
        _check("source", self.source, "")
        if not is_box(self.mask):
            _check("mask", self.mask, f"{_FILES} a box LEFT,TOP,RIGHT,BOTTOM")
        for each in split_controls(self.control):
            if not is_built_in(each):
                others = " or ".join(BUILT_IN)
                _check("control", each, f"{_FILES} {others}, which are made of the source")
