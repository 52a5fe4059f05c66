"""Prompt preprocessing before T5: upstream's score affixes and caption cleaning.

Cleaning is part of the model: the training captions went through it. It converts to lower case and
removes addresses, CJK characters, markup and most punctuation. Upstream took it from DeepFloyd IF
and runs it twice (`opensora/models/text_encoder/t5.py`, `text_preprocessing`). diffusers has the
same function in its Latte pipeline; this module calls that one, with the one step that it lacks.
"""

from __future__ import annotations

import html
import re
from io import StringIO
from types import FunctionType, SimpleNamespace
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings

#: Cleaning removes these scripts entirely.
_CJK_RANGES = ((0x31C0, 0x4DFF), (0x4E00, 0x9FFF))

#: Lower-case words with optional commas. Cleaning leaves such a prompt unchanged, except for words
#: from web pages and file names (`_REMOVED`, also inside of other words).
_PLAIN = re.compile(r"[a-z]+(?:,? [a-z]+)*\.?")
_REMOVED = (
    "shipping", "download", "click", "png", "jpg", "jpeg", "bmp", "webp", "eps", "pdf", "apk",
)  # fmt: skip


def with_affixes(prompt: str, settings: Settings) -> str:
    """Append 1.2's scores to the prompt, unless the prompt already contains them."""
    aesthetic = settings.option("aesthetic")
    motion = settings.option("motion_score")
    camera = settings.option("camera_motion")
    if aesthetic is not None and "aesthetic score:" not in prompt:
        prompt += f" aesthetic score: {aesthetic:.1f}."
    if motion is not None and "motion score:" not in prompt:
        prompt += f" motion score: {motion:.1f}."
    if camera is not None and "camera motion:" not in prompt:
        prompt += f" camera motion: {camera}."
    return prompt


def clean(prompt: str) -> str:
    """Clean the prompt for T5: twice, as upstream does (once is not always enough)."""
    plain = prompt.strip().lower()
    if _PLAIN.fullmatch(plain) and not any(word in plain for word in _REMOVED):
        return plain  # what is imported below takes longer than all else that a plan does
    from bs4 import BeautifulSoup
    from diffusers.pipelines.latte.pipeline_latte import LattePipeline

    def soup(text: str, **options: Any) -> BeautifulSoup:
        # BeautifulSoup warns of text that looks like an address or a file name, but not of a file's
        # content.
        return BeautifulSoup(StringIO(text), **options)

    def unescape(text: str) -> str:
        # Upstream strips as it unescapes, before it checks the first and last character.
        return html.unescape(text).strip()

    method: Any = LattePipeline._clean_caption
    own = {"BeautifulSoup": soup, "html": SimpleNamespace(unescape=unescape)}
    cleaned = FunctionType(method.__code__, {**method.__globals__, **own})
    # The method reads one class attribute of its pipeline: the class itself serves as `self`.
    return str(cleaned(LattePipeline, cleaned(LattePipeline, prompt)))


def check_not_lost(prompt: str) -> None:
    """Raise `InputError` if cleaning leaves nothing of a non-empty prompt.

    An empty negative prompt is valid.
    """
    if prompt.strip() and not clean(prompt):
        raise InputError(lost(prompt))


def lost(prompt: str) -> str:
    """Message for a prompt that cleaning empties: why, and what to do."""
    script = "Chinese characters" if loses_all(prompt) else "what stands in it"
    return (
        f"nothing is left of the prompt {prompt!r}: this model was trained on captions without "
        f"{script}; say it in English words"
    )


def loses_all(prompt: str) -> bool:
    """Whether the prompt is only in scripts that cleaning removes (mainly Chinese characters)."""
    letters = [ord(char) for char in prompt if char.isalpha()]
    return bool(letters) and all(
        any(low <= letter <= high for low, high in _CJK_RANGES) for letter in letters
    )
