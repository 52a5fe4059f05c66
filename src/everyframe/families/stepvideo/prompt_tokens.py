"""Tokenize a prompt for both of Step-Video's encoders, and report words that fit neither.

Runs before anything is loaded, so an over-long prompt is rejected early; plans use it too.
"""

from __future__ import annotations

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.families.stepvideo.checkpoint import CLIP_TOKENIZER, StepVideoFiles
from everyframe.families.stepvideo.config import StepVideoConfig
from everyframe.families.stepvideo.text import (
    CLIP_LENGTH,
    LLM_LENGTH,
    ClipTokenizer,
    StepTokenizer,
    Tokens,
)
from everyframe.runtime.request_checks import quoted


def texts_of(settings: Settings) -> list[str]:
    """Texts to encode: the prompt with its suffix and, with guidance, the negative prompt."""
    texts = [settings.prompt + settings.option("pos_magic")]
    if settings.guidance_scale > 1:
        assert settings.negative_prompt is not None, "resolved with guidance"
        texts.append(settings.negative_prompt)
    return texts


def llm_tokenizer(files: StepVideoFiles, config: StepVideoConfig) -> StepTokenizer:
    """Load Step-LLM's tokenizer."""
    return StepTokenizer(files.path("step_llm"), config.llm.padded_vocab_size)


def clip_tokenizer(files: StepVideoFiles, config: StepVideoConfig) -> ClipTokenizer:
    """Load CLIP's tokenizer."""
    return ClipTokenizer(files.path("clip") / CLIP_TOKENIZER, int(config.clip["vocab_size"]))


def tokens_of(
    settings: Settings, llm: StepTokenizer, clip: ClipTokenizer
) -> tuple[list[Tokens], list[str]]:
    """Step-LLM's tokens of each text, and the words of it that are not read.

    Raises:
        InputError: a text is too long for Step-LLM and may not be truncated; names the words.
    """
    tokens, notes = [], []
    for which, text in zip(("prompt", "negative prompt"), texts_of(settings), strict=False):
        read, seen = llm.tokens(text), clip.tokens(text)
        if read.cut:
            cut = quoted(llm.words(read.cut))
            if not settings.option("truncate_prompt"):
                raise InputError(
                    f"the {which} has {read.num_tokens} tokens, what is put behind it "
                    f"included, and Step-LLM reads {LLM_LENGTH}; shorten it, or drop "
                    f"its end with --truncate-prompt, which cuts: {cut}"
                )
            notes.append(f"the {which} is too long for Step-LLM; its end is cut: {cut}")
        if seen.cut:
            # As in upstream: CLIP reads the beginning, Step-LLM the whole.
            notes.append(
                f"of the {which}'s {seen.num_tokens} tokens CLIP reads {CLIP_LENGTH}, and not "
                f"{quoted(clip.words(seen.cut))}; Step-LLM does"
            )
        tokens.append(read)
    return tokens, notes
