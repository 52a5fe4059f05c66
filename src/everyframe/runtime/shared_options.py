"""Request options that several families share, each defined once for their `options.py`. No torch.

Options of all families are in `everyframe.core.request`.
"""

from __future__ import annotations

from typing import Any

from everyframe.core.options import option


def fit_option() -> Any:
    """How an image of another aspect ratio is fitted to the video's size."""
    return option(
        "Fit given images and videos to the video's size: crop, pad or stretch; by default our own "
        "models crop, and a diffusers pipeline gets them unchanged."
    )


def variant_option() -> Any:
    """Which stored precision of the weights is read, if there are several."""
    return option(
        "Which stored precision of the weights to load if a model has several, such as fp16.",
        pattern=r"^\w+$",
    )


def truncate_prompt_option() -> Any:
    """Whether a prompt too long for the text encoder is truncated."""
    return option("Use the beginning of a prompt that is too long.", default=False)
