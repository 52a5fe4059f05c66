"""T5's encoder, for the families that read prompts with T5. The classes are transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import CheckpointError


def t5_config(data: Mapping[str, Any]) -> Any:
    """Build transformers' `T5Config` from a checkpoint's config.json."""
    from transformers.models.t5.configuration_t5 import T5Config

    kind = data.get("model_type", "t5")
    if kind != "t5":
        raise CheckpointError(f"the text encoder's config.json is of a {kind!r} model, expected t5")
    return T5Config.from_dict(dict(data))


def build_encoder(data: Mapping[str, Any]) -> nn.Module:
    """Build an untrained `T5EncoderModel` of those sizes; use ``torch.device("meta")``."""
    # From the submodule: the package first scans all of its models.
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    encoder: nn.Module = T5EncoderModel(t5_config(data))
    return encoder


def pad(tokenizer: Any, ids: Sequence[int], max_length: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (1, max_length) each."""
    padding = max_length - len(ids)
    pad_id = tokenizer.pad_token_id or 0
    row = torch.tensor([list(ids) + [pad_id] * padding])
    mask = torch.tensor([[True] * len(ids) + [False] * padding])
    return row, mask
