"""CLIP's tokenizer, for the families that read prompts with CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from everyframe.checkpoints.config_errors import foreign_errors
from everyframe.checkpoints.folder import describe_missing
from everyframe.core.errors import CheckpointError
from everyframe.runtime.request_checks import too_long_prompt


def load_tokenizer(folder: Path) -> Any:
    """Load the `CLIPTokenizer` in `folder`; never downloads."""
    from transformers import CLIPTokenizer

    wanted = ("tokenizer.json", "vocab.json")
    if not any((folder / name).is_file() for name in wanted):
        raise CheckpointError(f"no tokenizer: {describe_missing(folder, wanted)}")
    with foreign_errors(f"{folder} holds no usable tokenizer"):
        return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def tokenize(
    tokenizer: Any, prompt: str, num_tokens: int, *, truncate: bool
) -> tuple[Tensor, Tensor, str]:
    """Token ids and mask, (1, num_tokens) each, and the words that were cut ("" if none).

    Raises `InputError` for a prompt that is too long unless `truncate`; names the words to cut.
    """
    limit = min(num_tokens, int(tokenizer.model_max_length))
    # Truncated, so that the tokenizer prints no warning.
    whole = tokenizer(prompt, truncation=True, max_length=100_000)["input_ids"]
    cut = ""
    if len(whole) > limit:
        cut = str(tokenizer.decode(whole[limit - 1 : -1])).strip()
        if not truncate:
            raise too_long_prompt(len(whole), limit, cut)
    row = tokenizer(
        prompt, padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
    )
    return row["input_ids"], row["attention_mask"], cut
