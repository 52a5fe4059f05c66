"""Options that more than one family knows: each written once, for their `options.py`. No torch.

Not here: options that every family shares, which are `everyframe.core.request`.
"""

from __future__ import annotations

from typing import Any

from everyframe.core.options import option


def fit_option() -> Any:
    """How a picture of other proportions is brought to the size that is worked at."""
    return option(
        "Bring given pictures and videos to the video's size: crop, pad or stretch; without it our "
        "own models crop, and a diffusers pipeline has them as they are.",
        group="Family",
    )


def variant_option() -> Any:
    """Which of several sets of the same weights is read."""
    return option(
        "Stored precision of the weights to take where a model has several, such as fp16.",
        group="Family",
        pattern=r"^\w+$",
    )


def truncate_prompt_option() -> Any:
    """Whether a prompt that the text encoder can't hold is cut."""
    return option(
        "Go on with the beginning of a prompt that is too long.", group="Family", default=False
    )
