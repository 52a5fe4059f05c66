"""Which tensors upstream's checkpoints hold and what they are called here: data, no arithmetic.

Loading itself is `everyframe.checkpoints.strict`. Read next: `checkpoint.py`, `family.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from everyframe.checkpoints.strict import KeyMap
from everyframe.families.renames import OLD_VAE_ATTENTION

#: Position tables that upstream stores beside the weights and that are computed here in float32.
STDIT_KEYS = KeyMap(ignore=(r"pos_embed", r"pos_embed_temporal"))
STDIT3_KEYS = KeyMap(ignore=(r"rope\.freqs",))

#: sd-vae-ft-ema is from before diffusers renamed the attention of its autoencoders.
VIDEO_VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)
#: A plain diffusers folder: its `AutoencoderKL` stands one level lower here.
IMAGE_VAE_KEYS = KeyMap(rename=(*OLD_VAE_ATTENTION, (r"^", "module.")))

#: Of a whole T5 only the encoder is wanted; its embedding may be stored under either name.
T5_KEYS = KeyMap(
    ignore=(r"decoder\..*", r"lm_head\..*"),
    tied=(("shared.weight", "encoder.embed_tokens.weight"),),
)


def keys_of(component: str, version: str) -> KeyMap:
    """How the names in that component's files become the module's."""
    if component == "text_encoder":
        return T5_KEYS
    if component == "denoiser":
        return STDIT_KEYS if version == "1.0" else STDIT3_KEYS
    return IMAGE_VAE_KEYS if version == "1.0" else VIDEO_VAE_KEYS


_VERSION_MARKS = (
    ("2.0", ("double_blocks.", "single_blocks.")),
    ("1.1", ("t_block_temp.", "csize_embedder.")),
    ("1.3", ("x_embedder_cond.", "x_embedder_cond_mask.")),
    ("1.2", ("spatial_blocks.",)),
    ("1.0", ("blocks.0.attn_temp.",)),
)


def version_of(names: Iterable[str]) -> str | None:
    """The Open-Sora version whose denoiser has tensors of these names, or None."""
    names = tuple(names)
    for version, marks in _VERSION_MARKS:
        if any(name.startswith(mark) for mark in marks for name in names):
            return version
    return None
