"""Which tensors the folders hold beside or under other names than the modules': data.

Loading itself is `everyframe.checkpoints.strict`. Read next: `components.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from everyframe.checkpoints.strict import KeyMap
from everyframe.families.renames import OLD_VAE_ATTENTION

VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)

#: transformers stored the table of positions, 0, 1, 2 …, before 4.31.
_POSITIONS = (r"(text_model\.)?embeddings\.position_ids",)


def keys_of(component: str, text_names: Iterable[str]) -> KeyMap:
    """How the names in that component's files become the module's.

    `text_names` are those of the text encoder as it is built here.
    """
    if component == "text_encoder":
        return text_keys(any(name.startswith("text_model.") for name in text_names))
    return VAE_KEYS if component == "vae" else KeyMap()


def text_keys(has_prefix: bool) -> KeyMap:
    """CLIP's text model: transformers 5 leaves out the prefix that files from before have."""
    rename = (r"^(?!text_model\.)", "text_model.") if has_prefix else (r"^text_model\.", "")
    return KeyMap(rename=(rename,), ignore=_POSITIONS)
