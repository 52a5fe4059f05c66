"""Tensor names in files of one component, as data: prefixes, and tensors that may be left out.

Sources: ComfyUI (`comfy/model_detection.py`, `comfy/sd.py`), the original checkpoints of Wan,
LTX-Video, HunyuanVideo and Stable Diffusion, and city96/ComfyUI-GGUF (`tools/convert.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Prefixes of one component's tensors; the one that names most of them counts.
PREFIXES = (
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "model.",
    "transformer.",
    "unet.",
    "net.",
    "module.",
    "vae.",
    "audio_vae.",
    "vocoder.",
    "first_stage_model.",
    "text_model.",
    "vision_model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "text_encoder.",
    "text_encoder_2.",
    "cond_stage_model.transformer.",
    "conditioner.embedders.0.transformer.",
    "text_encoders.umt5xxl.transformer.",
    "text_encoders.t5xxl.transformer.",
    "text_encoders.llama.transformer.model.",
    "text_encoders.clip_l.transformer.",
    "text_encoders.clip_l.transformer.text_model.",
)

#: Prefixes of other components in a file that holds several.
OTHERS = (
    "model.diffusion_model.",
    "model_ema.",
    "vae.",
    "audio_vae.",
    "vocoder.",
    "first_stage_model.",
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
    "text_embedding_projection.",
)


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a file that have no parameter, by a regular expression for the whole name.

    Attributes:
        pattern: matches the name, with or without a prefix.
        description: their meaning, for messages.
    """

    pattern: str
    description: str


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut(r"(spiece_model|tokenizer_json|tekken_model)", "a tokenizer, which the model's own is"),
    LeftOut(r"(.*\.)?(position_ids|inv_freq|rope\.freqs|rope_freqs\.weight)",
            "positions, which the model computes"),
    LeftOut(r"(text_projection(\.weight)?|logit_scale|lm_head\.weight|output\.weight)",
            "layers after the text encoder's last"),
    LeftOut(r"per_channel_statistics\.(channel|mean-of-stds|mean-of-stds_over_std-of-means)",
            "statistics that no decoder uses"),
    LeftOut(r"loss\..*", "layers that training alone uses"),
)  # fmt: skip
"""Checked against the module first: one that has such a parameter gets it."""
