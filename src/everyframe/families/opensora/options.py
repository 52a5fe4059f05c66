"""Options of the Open-Sora family. No torch here.

Only 1.2 accepts the scores (aesthetic, motion) and the camera motion.
"""

from __future__ import annotations

from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import truncate_prompt_option


class OpenSoraOptions(FamilyOptions):
    """Options of Open-Sora: 1.2's prompt affixes, and components outside the model folder."""

    aesthetic: float | None = option(
        "Aesthetic score, 1.2 only: about 4 (plain) to 7 (polished).", ge=0, le=10
    )
    motion_score: float | None = option(
        "Amount of motion, 1.2 only: about 0 (still) to 30 (a lot).", ge=0, le=1000
    )
    camera_motion: str | None = option(
        'Camera motion, 1.2 only, such as "pan left".', max_length=100
    )
    truncate_prompt: bool = truncate_prompt_option()
    vae: str | None = option(
        "Folder or hub id of the autoencoder, if it is not beside the denoiser.", names_model=True
    )
    text_encoder: str | None = option(
        "Folder or hub id of T5 and its tokenizer, if it is not beside the denoiser.",
        names_model=True,
    )
