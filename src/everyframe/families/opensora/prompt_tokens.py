"""Tokenize prompts of Open-Sora 1.0 and 1.2 for T5, and report truncation. No torch here."""

from __future__ import annotations

from typing import Any

from everyframe.core.plan import Settings
from everyframe.families.opensora.prompts import check_not_lost, clean, with_affixes
from everyframe.families.t5_tokenizer import read_prompt


def read_prompts(
    tokenizer: Any, settings: Settings, max_length: int
) -> list[tuple[list[int], str]]:
    """Tokenize the prompt and, if there is one, the negative prompt; see `read_prompt`.

    Raises `InputError` also for a prompt of which cleaning leaves nothing.
    """
    # Scores say how the video should be; on both sides guidance would cancel them.
    prompts = [(settings.prompt, with_affixes(settings.prompt, settings))]
    if settings.negative_prompt is not None:
        prompts.append((settings.negative_prompt, settings.negative_prompt))
    for prompt, _ in prompts:
        check_not_lost(prompt)
    truncate = bool(settings.option("truncate_prompt"))
    return [
        read_prompt(tokenizer, clean(each), max_length, truncate=truncate) for _, each in prompts
    ]
