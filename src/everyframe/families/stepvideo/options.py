"""Options of the Step-Video family. No torch here.

`settings.py` fills in the values that each variant recommends.
"""

from __future__ import annotations

from everyframe.core.options import FamilyOptions, option
from everyframe.runtime.shared_options import truncate_prompt_option


class StepVideoOptions(FamilyOptions):
    """Options of Step-Video: timestep shift, prompt suffix, and where components are."""

    time_shift: float | None = option(
        "How many of the steps are at high noise; above 1 is more.", gt=0, le=1000
    )
    pos_magic: str | None = option(
        "Text added after the prompt; '' for none. By default upstream's words for quality.",
        max_length=2000,
    )
    llm_bias: str = option(
        "How Step-LLM weighs the distance of words: sqrt (derived, not verified), linear or none.",
        default="sqrt",
    )
    truncate_prompt: bool = truncate_prompt_option()
    base: str | None = option(
        "Folder or hub id of step_llm, hunyuan_clip and vae, if they are not beside the denoiser.",
        names_model=True,
    )
