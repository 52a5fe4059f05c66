"""T5 text encoder: token ids to hidden states and a mask.

Upstream: `opensora/models/text_encoder/t5.py` (`DeepFloyd/t5-v1_1-xxl`, padded to the model's
length, attention mask given). The classes come from transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.plan import Settings
from everyframe.families.opensora.prompt_tokens import read_prompts
from everyframe.families.t5_encoder import pad
from everyframe.parallel.communicator import broadcastable


@broadcastable
@dataclass(frozen=True)
class TextEmbedding:
    """T5 hidden states (1, L, D) and a bool mask (1, L) of the real tokens."""

    hidden: Tensor
    mask: Tensor


def tokens_of(
    tokenizer: Any, settings: Settings, max_length: int
) -> list[tuple[Tensor, Tensor, str]]:
    """Tokenize the prompt and, if there is one, the negative prompt for T5.

    Token ids and mask, (1, max_length) each, and the words that were cut ("" if none).
    """
    found = read_prompts(tokenizer, settings, max_length)
    return [(*pad(tokenizer, ids, max_length), cut) for ids, cut in found]


def embed(
    encoder: nn.Module, ids: Tensor, mask: Tensor, device: str | torch.device = "cpu"
) -> TextEmbedding:
    """T5's last hidden states for token ids (1, L) and mask (1, L); float32, on the CPU.

    `device` is where the encoder computes; its weights may be elsewhere (offload).
    """
    answer = encoder(input_ids=ids.to(device), attention_mask=mask.to(device, torch.long))
    hidden = answer.last_hidden_state
    return TextEmbedding(hidden.to("cpu", torch.float32), mask)
