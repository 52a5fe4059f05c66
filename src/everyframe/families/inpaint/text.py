"""CLIP text encoder and tokenizer: prompt to hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.checkpoints.config_errors import foreign_errors
from everyframe.checkpoints.folder import describe_missing
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import Settings
from everyframe.runtime.request_checks import too_long_prompt


def load_tokenizer(folder: Path) -> Any:
    """Load the `CLIPTokenizer` in `folder`; never downloads."""
    from transformers import CLIPTokenizer

    wanted = ("tokenizer.json", "vocab.json")
    if not any((folder / name).is_file() for name in wanted):
        raise CheckpointError(f"no tokenizer: {describe_missing(folder, wanted)}")
    with foreign_errors(f"{folder} holds no usable tokenizer"):
        return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def prompts_of(settings: Settings) -> list[str]:
    """Prompts to encode; with guidance the negative prompt comes first, empty if not given."""
    guided = settings.guidance_scale > 1
    return [settings.negative_prompt or "", settings.prompt] if guided else [settings.prompt]


def tokens_of(
    tokenizer: Any, settings: Settings, num_tokens: int
) -> list[tuple[Tensor, Tensor, str]]:
    """Tokenize every prompt for CLIP; see `tokenize`."""
    truncate = bool(settings.option("truncate_prompt"))
    prompts = prompts_of(settings)
    return [tokenize(tokenizer, each, num_tokens, truncate=truncate) for each in prompts]


def tokenize(
    tokenizer: Any, prompt: str, num_tokens: int, *, truncate: bool
) -> tuple[Tensor, Tensor, str]:
    """Token ids and mask, (1, num_tokens) each, and the words that were cut ("" if none).

    Raises `InputError` for a prompt that is too long unless `truncate`; names the words to cut.
    """
    limit = min(num_tokens, int(tokenizer.model_max_length))
    # Asked to cut, so that the tokenizer prints no warning of its own.
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


def embed(encoder: nn.Module, ids: Tensor, mask: Tensor, *, device: str, uses_mask: bool) -> Tensor:
    """CLIP's last hidden states (1, L, D) for token ids (1, L); float32, on the CPU.

    Padding is read like words, as in Stable Diffusion's training, unless the checkpoint's config
    says otherwise (`uses_mask`). `device` is where the encoder computes.
    """
    hidden = encoder(
        input_ids=ids.to(device), attention_mask=mask.to(device) if uses_mask else None
    ).last_hidden_state
    return hidden.to("cpu", torch.float32)  # type: ignore[no-any-return]
