"""CLIP text encoder: prompt to hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.plan import Settings
from everyframe.families.clip_tokenizer import tokenize


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


def embed(encoder: nn.Module, ids: Tensor, mask: Tensor, *, device: str, uses_mask: bool) -> Tensor:
    """CLIP's last hidden states (1, L, D) for token ids (1, L); float32, on the CPU.

    Padding is read like words, as in Stable Diffusion's training, unless the checkpoint's config
    says otherwise (`uses_mask`). `device` is where the encoder computes.
    """
    hidden = encoder(
        input_ids=ids.to(device), attention_mask=mask.to(device) if uses_mask else None
    ).last_hidden_state
    return hidden.to("cpu", torch.float32)  # type: ignore[no-any-return]
