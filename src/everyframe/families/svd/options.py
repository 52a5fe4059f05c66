"""Options of the Stable Video Diffusion family. No torch here.

Names and defaults are those of diffusers' `StableVideoDiffusionPipeline`.
"""

from __future__ import annotations

from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import fit_option, variant_option


class SVDOptions(FamilyOptions):
    """Options of Stable Video Diffusion: motion, image noise, guidance and decoding."""

    motion_bucket_id: int = option(
        "Amount of motion: about 1 (still) to 255 (a lot).", default=127, ge=0, le=1000
    )
    noise_aug_strength: float = option(
        "Noise on the image; more lets the video differ more from it.", default=0.02, ge=0, le=100
    )
    min_guidance_scale: float = option("Guidance of the first frame.", default=1.0, ge=0, le=1000)
    max_guidance_scale: float = option(
        "Guidance of the last frame; it rises from the first. 1 is off.", default=3.0, ge=0, le=1000
    )
    decode_chunk_size: int | None = option(
        "Frames decoded at once, by default all; fewer need less memory and change the frames.",
        gt=0,
        le=100_000,
    )
    fit: str | None = fit_option()
    variant: str | None = variant_option()
