"""Options of the Open-Sora 2.0 family. No torch here."""

from __future__ import annotations

from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import (
    motion_score_option,
    text_encoder_option,
    truncate_prompt_option,
    vae_option,
)


class OpenSora2Options(FamilyOptions):
    """Options of Open-Sora 2.0: motion, guidance of given frames, a first picture, components."""

    motion_score: float | None = motion_score_option()
    image_guidance_scale: float = option(
        "How strongly given frames steer; 1 is off.", default=3.0, ge=0, le=1000
    )
    text_oscillation: bool = option("Guidance is off in odd steps from 10 on.", default=True)
    image_oscillation: bool = option("Image guidance is off in odd steps from 10 on.", default=True)
    image_fading: bool = option(
        "Image guidance falls over the steps and rises over the frames; for given pictures.",
        default=True,
    )
    flow_shift: float | None = option(
        "How many of the steps are at high noise; by default by size and length. 1 is even.",
        gt=0,
        le=1000,
    )
    clip_frames: int | None = option(
        "Frames of the video to continue that are read: 33 by default, or 65.", gt=0, le=1000
    )
    clip_at: str = option(
        "Where they are: head continues the given video, tail leads up to it.", default="head"
    )
    first_frame: str | None = option(
        "Draw a first picture and begin with it: flux draws it by FLUX.1-dev."
    )
    first_frame_resolution: str = option(
        "Size at which it is drawn, before it is resized: 768px or 256px at the video's aspect "
        "ratio, or video for the video's own size, which takes less memory.",
        default="768px",
    )
    flux: str | None = option(
        "Folder or hub id of FLUX.1-dev, if it is not beside the denoiser: flux1-dev.safetensors "
        "and flux1-dev-ae.safetensors, or diffusers' layout.",
        names_model=True,
    )
    vae_scaling: float | None = option(
        "Scale of the DC-AE's latents: 1, or 0.493 as in upstream's training.", gt=0, le=1000
    )
    truncate_prompt: bool = truncate_prompt_option()
    vae: str | None = vae_option()
    text_encoder: str | None = text_encoder_option()
    clip: str | None = option(
        "Folder or hub id of CLIP and its tokenizer, if it is not beside the denoiser.",
        names_model=True,
    )
