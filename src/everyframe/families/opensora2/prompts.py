"""Prompts of Open-Sora 2.0: their suffixes, and their tokens for T5 and CLIP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.families import clip_tokenizer, t5_tokenizer
from everyframe.families.opensora2.prompt_lengths import CLIP_LENGTH, T5_LENGTH
from everyframe.families.opensora2.settings import is_guided
from everyframe.families.t5_encoder import pad
from everyframe.runtime.request_checks import quoted


@dataclass(frozen=True)
class PromptText:
    """One text to encode: its role in messages, and its words for the encoders."""

    role: str
    words: str


@dataclass(frozen=True)
class TokenIds:
    """Token ids (1, L) of one text, padded to the encoder's length, on the host."""

    ids: Tensor


def with_suffixes(prompt: str, fps: float, motion_score: float | None) -> str:
    """The prompt with upstream's suffixes: a full stop, the frame rate and the motion score."""
    text = prompt.strip()
    if not text.endswith("."):
        text += "."
    if not re.search(r"\d+ FPS\.$", text):
        text += f" {fps:g} FPS."
    return f"{text} {motion_score:g} motion score." if motion_score else text


def texts_of(settings: Settings) -> list[PromptText]:
    """Prompt, negative prompt if it is needed, and the prompt of a first picture."""
    prompt = with_suffixes(settings.prompt, settings.fps, settings.option("motion_score"))
    found = [PromptText("prompt", prompt)]
    if is_guided(settings):
        found.append(PromptText("negative prompt", settings.negative_prompt or ""))
    if settings.option("first_frame"):
        found.append(PromptText("first picture's prompt", settings.prompt))
    return found


def t5_tokens(folder: Path, settings: Settings) -> tuple[list[TokenIds], list[str]]:
    """T5's tokens of each text, and notes on truncated words.

    Raises:
        InputError: a text is too long for T5 and may not be truncated; names the words.
    """
    tokenizer = t5_tokenizer.load_tokenizer(folder)
    truncate = bool(settings.option("truncate_prompt"))
    tokens, notes = [], []
    for text in texts_of(settings):
        ids, cut = t5_tokenizer.read_prompt(tokenizer, text.words, T5_LENGTH, truncate=truncate)
        tokens.append(TokenIds(pad(tokenizer, ids, T5_LENGTH)[0]))
        if cut:
            notes.append(f"the {text.role} is too long for T5; its end is cut: {quoted(cut)}")
    return tokens, notes


def clip_tokens(folder: Path, settings: Settings) -> tuple[list[TokenIds], list[str]]:
    """CLIP's tokens of each text, and notes on words that only T5 reads."""
    tokenizer = clip_tokenizer.load_tokenizer(folder)
    tokens, notes = [], []
    for text in texts_of(settings):
        ids, _, cut = clip_tokenizer.tokenize(tokenizer, text.words, CLIP_LENGTH, truncate=True)
        # Upstream pads with the end mark, also where the tokenizer's own files say otherwise.
        end = tokenizer.eos_token_id
        first = int((ids[0] == end).nonzero()[0]) if end is not None and (ids == end).any() else -1
        if first < 0:
            raise CheckpointError(f"{folder} is no tokenizer of CLIP: it ends no text with a mark")
        ids[:, first:] = end
        tokens.append(
            TokenIds(torch.nn.functional.pad(ids, (0, CLIP_LENGTH - ids.shape[1]), value=end))
        )
        if cut:
            notes.append(
                f"of the {text.role} CLIP reads {CLIP_LENGTH} tokens, and not {quoted(cut)}; "
                "T5 does"
            )
    return tokens, notes
