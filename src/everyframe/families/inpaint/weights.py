"""Which tensors the folders hold beside or under other names than the modules': data.

Loading itself is `everyframe.checkpoints.strict`. Read next: `components.py`.
"""

from __future__ import annotations

from everyframe.checkpoints.strict import KeyMap
from everyframe.families.renames import OLD_VAE_ATTENTION

VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)
UNET_KEYS = KeyMap()
CONTROLNET_KEYS = KeyMap()

#: transformers stored the table of positions, 0, 1, 2 …, before 4.31.
_POSITIONS = (r"(text_model\.)?embeddings\.position_ids",)


def text_keys(has_prefix: bool) -> KeyMap:
    """CLIP's text model: transformers 5 leaves out the prefix that files from before have."""
    rename = (r"^(?!text_model\.)", "text_model.") if has_prefix else (r"^text_model\.", "")
    return KeyMap(rename=(rename,), ignore=_POSITIONS)
