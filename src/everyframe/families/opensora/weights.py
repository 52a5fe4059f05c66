"""Which tensors upstream's checkpoints hold and what they are called here: data, no arithmetic.

Loading itself is `everyframe.checkpoints.strict`. Read next: `checkpoint.py`, `family.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from everyframe.checkpoints.strict import KeyMap

#: Position tables that upstream stores beside the weights and that are computed here in float32.
STDIT_KEYS = KeyMap(ignore=(r"pos_embed", r"pos_embed_temporal"))
STDIT3_KEYS = KeyMap(ignore=(r"rope\.freqs",))

#: diffusers renamed the attention of its autoencoders; old files (sd-vae-ft-ema) have these names.
_OLD_ATTENTION = (
    (r"(\.attentions\.\d+)\.query\.", r"\1.to_q."),
    (r"(\.attentions\.\d+)\.key\.", r"\1.to_k."),
    (r"(\.attentions\.\d+)\.value\.", r"\1.to_v."),
    (r"(\.attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
)
VIDEO_VAE_KEYS = KeyMap(rename=_OLD_ATTENTION)
#: A plain diffusers folder: its `AutoencoderKL` stands one level lower here.
IMAGE_VAE_KEYS = KeyMap(rename=(*_OLD_ATTENTION, (r"^", "module.")))

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
