"""Options that only ControlNet inpainting knows. No torch here.

Names and defaults are those of diffusers' `StableDiffusionControlNetInpaintPipeline`, where it has
them. Read next: `settle.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from everyframe.core.options import FamilyOptions, option
from everyframe.families.inpaint.named import check_there
from everyframe.families.shared_options import fit_option, truncate_prompt_option


def _split(value: Any) -> Any:
    """``"0.5,0.8"`` from a command line as two numbers."""
    return tuple(value.split(",")) if isinstance(value, str) and "," in value else value


#: One number for all ControlNets, or one for each.
OneOrEach = Annotated[float | tuple[float, ...], BeforeValidator(_split)]


class InpaintOptions(FamilyOptions):
    """What is repainted and where, what steers it, and how far it may go from the source."""

    source: Any = option(
        "What is repainted in part: a picture, a folder of frames or a video.",
        group="Family",
        names_files=True,
    )
    mask: Any = option(
        "Where: white in a picture, folder or video of the source's size, or a box "
        "LEFT,TOP,RIGHT,BOTTOM in pixels.",
        group="Family",
        names_files=True,
    )
    controlnet: Any = option(
        "Folder, hub id or short name (canny, inpaint, depth, …) of the ControlNet, if it is not "
        "in the model's folder; several with commas.",
        group="Family",
        names_model=True,
    )
    control: Any = option(
        "What the ControlNet sees: a picture, folder or video, or canny or inpaint, which are made "
        "of the source; with commas for several ControlNets.",
        group="Family",
        names_files=True,
    )
    strength: float = option(
        "How far the repainted part may go from the source; 1 ignores what was there.",
        group="Family",
        default=1.0,
        gt=0,
        le=1,
    )
    controlnet_conditioning_scale: OneOrEach = option(
        "How strongly the ControlNet steers; with commas for several.", group="Family", default=0.5
    )
    control_guidance_start: OneOrEach = option(
        "Share of the steps after which the ControlNet begins to steer.",
        group="Family",
        default=0.0,
    )
    control_guidance_end: OneOrEach = option(
        "Share of the steps after which it steers no more.", group="Family", default=1.0
    )
    guess_mode: bool = option(
        "Let the ControlNet steer the prompt's side of guidance alone.",
        group="Family",
        default=False,
    )
    canny_low: float | None = option(
        "Weaker threshold of canny, 100 if not given: edges that hang on stronger ones.",
        group="Family",
        ge=0,
        le=10_000,
    )
    canny_high: float | None = option(
        "Stronger threshold of canny, 200 if not given: edges of their own.",
        group="Family",
        ge=0,
        le=10_000,
    )
    frames_at_once: int = option(
        "Frames denoised and decoded together; more need more memory.",
        group="Family",
        default=1,
        gt=0,
        le=1000,
    )
    fit: str | None = fit_option()
    unblended: bool = option(
        "Keep what the decoder makes outside of the mask too, as diffusers does, and not the "
        "source itself.",
        group="Family",
        default=False,
    )
    truncate_prompt: bool = truncate_prompt_option()

    def check_named(self) -> None:
        """Raise `MediaError` for a source, mask or control that is not there."""
        check_there(self.source, self.mask, self.control)
