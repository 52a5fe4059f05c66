"""CLIP's text model, for the families that read prompts with CLIP. The classes are transformers'.

The import brings no torch, as key maps are read for plans too. The tokenizer is in
`clip_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.key_map import KeyMap

if TYPE_CHECKING:
    from torch import nn

#: transformers before 4.31 stored the position ids 0, 1, 2 …
_POSITION_IDS = r"(text_model\.)?embeddings\.position_ids"


def text_model_keys(names: Iterable[str], ignore: Iterable[str] = ()) -> KeyMap:
    """Key map from a file of CLIP to the text model with these parameter names.

    transformers 5 drops the prefix that older files have. `ignore` are patterns of tensors that
    the file holds beside the text model.
    """
    has_prefix = any(name.startswith("text_model.") for name in names)
    rename = (r"^(?!text_model\.)", "text_model.") if has_prefix else (r"^text_model\.", "")
    return KeyMap(rename=(rename,), ignore=(_POSITION_IDS, *ignore))


def build_text_model(config: Mapping[str, Any]) -> nn.Module:
    """Build an untrained `CLIPTextModel` of these sizes; use ``torch.device("meta")``."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    model: Any = CLIPTextModel(CLIPTextConfig(**config))
    # A table that no checkpoint holds: not built on meta.
    embeddings = getattr(model, "text_model", model).embeddings
    positions = torch.arange(model.config.max_position_embeddings, device="cpu")[None]
    embeddings.register_buffer("position_ids", positions, persistent=False)
    made: nn.Module = model
    return made
