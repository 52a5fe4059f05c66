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


def source_option() -> Any:
    """What video to video begins with."""
    return option(
        "Video, folder of frames or picture to change: inpainting repaints its masked part; a "
        "diffusers pipeline gets it as its parameter video.",
        names_files=True,
    )


def strength_option() -> Any:
    """How far video to video goes from its source."""
    return option(
        "How far the result may differ from the source; 1, the default of inpainting, ignores the "
        "source.",
        gt=0,
        le=1,
    )


def variant_option() -> Any:
    """Which stored precision of the weights is read, if there are several."""
    return option(
        "Which stored precision of the weights to load if a model has several, such as fp16.",
        pattern=r"^\w+$",
    )


def motion_score_option() -> Any:
    """Motion score, which two versions of Open-Sora read in the prompt."""
    return option(
        "Amount of motion, added to the prompt: about 0 (still) to 30 (a lot) for Open-Sora 1.2; "
        "1 (still), 4 (usual, by default) to 15 for 2.0, and 0 for none.",
        ge=0,
        le=1000,
    )


def vae_option() -> Any:
    """Where the autoencoder is."""
    return option(
        "Folder or hub id of the autoencoder, if it is not beside the denoiser.", names_model=True
    )


def text_encoder_option() -> Any:
    """Where T5 is."""
    return option(
        "Folder or hub id of T5 and its tokenizer, if it is not beside the denoiser.",
        names_model=True,
    )


def truncate_prompt_option() -> Any:
    """Whether a prompt too long for the text encoder is truncated."""
    return option("Use the beginning of a prompt that is too long.", default=False)
