"""Options of the Open-Sora family. No torch here.

Only 1.2 accepts the scores (aesthetic, motion) and the camera motion.
"""

from __future__ import annotations

from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import (
    motion_score_option,
    text_encoder_option,
    truncate_prompt_option,
    vae_option,
)


class OpenSoraOptions(FamilyOptions):
    """Options of Open-Sora: 1.2's prompt affixes, and components outside the model folder."""

    aesthetic: float | None = option(
        "Aesthetic score, 1.2 only: about 4 (plain) to 7 (polished).", ge=0, le=10
    )
    motion_score: float | None = motion_score_option()
    camera_motion: str | None = option(
        'Camera motion, 1.2 only, such as "pan left".', max_length=100
    )
    truncate_prompt: bool = truncate_prompt_option()
    vae: str | None = vae_option()
    text_encoder: str | None = text_encoder_option()
