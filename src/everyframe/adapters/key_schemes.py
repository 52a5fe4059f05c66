"""Key schemes of LoRA files as data: prefixes, suffixes, and tensors that a model may lack.

A key is a prefix, the name of a module, and a suffix for the tensor's role. Sources: PEFT,
diffusers (`loaders/lora_conversion_utils.py`), ComfyUI (`comfy/lora.py`, `comfy/weight_adapter`),
kohya-ss sd-scripts and musubi-tuner, LyCORIS, LightX2V (`tools/extract/lora_extractor.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What PEFT puts between a factor and ``weight``: the adapter's name.
_ADAPTER = r"(?:\.(?!weight$|bias$)[^.]+)?"

#: (role of the tensor, suffix as a regular expression); the first match counts.
SUFFIXES: tuple[tuple[str, str], ...] = (
    ("down", rf"\.lora_A{_ADAPTER}(?:\.weight)?"),
    ("up", rf"\.lora_B{_ADAPTER}(?:\.weight)?"),
    ("up_bias", rf"\.lora_B{_ADAPTER}\.bias"),
    ("down", r"(?:\.lora_down|[._]lora\.down|\.lora_linear_layer\.down)\.weight"),
    ("up", r"(?:\.lora_up|[._]lora\.up|\.lora_linear_layer\.up)\.weight"),
    ("mid", r"\.lora_mid\.weight"),
    ("alpha", r"\.alpha"),
    ("diff", r"\.(?:diff|w_norm)"),
    ("diff_b", r"\.(?:diff_b|b_norm)"),
    ("diff_m", r"(?:\.modulation)?\.diff_m"),
    *((name, rf"\.{name}") for name in (
        "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2",
        "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2",
        "set_weight",
    )),
    ("dora", rf"\.(?:dora_scale|lora_magnitude_vector{_ADAPTER}(?:\.weight)?)"),
)  # fmt: skip

#: Suffixes of known meaning that are not read, with the reason.
NOT_READ: tuple[tuple[str, str], ...] = (
    (r"\.reshape_weight", "it gives the layer another shape, which makes another model of it"),
    (r"\.modules_to_save\..*", "it is a whole layer that PEFT saved beside the adapter"),
    (r"\.lora_embedding_[AB].*", "it is of an embedding"),
)

_SPLITS = tuple(
    (role, re.compile(rf"(?P<stem>.+?){suffix}", re.DOTALL)) for role, suffix in SUFFIXES
)


def split_key(key: str) -> tuple[str, str] | None:
    """(stem, role) of a key; None if its suffix is not known."""
    for role, pattern in _SPLITS:
        match = pattern.fullmatch(key)
        if match:
            return match["stem"], role
    return None


def why_not_read(key: str) -> str:
    """Why a tensor of a known but unsupported role is refused; empty for any other tensor."""
    for suffix, reason in NOT_READ:
        if re.fullmatch(rf".+?{suffix}", key):
            return reason
    return ""


@dataclass(frozen=True)
class Prefix:
    """A prefix of module names.

    Attributes:
        text: the prefix.
        component: component that it names; empty for the denoiser, whatever its name.
        is_flat: whether dots in the rest of the name are underscores.
    """

    text: str
    component: str = ""
    is_flat: bool = False


#: Prefixes; several may follow each other.
PREFIXES: tuple[Prefix, ...] = (
    Prefix("base_model.model."),
    Prefix("diffusion_model."),
    Prefix("model."),
    Prefix("module."),
    Prefix("pipe."),
    Prefix("dit."),
    Prefix("transformer.", "transformer"),
    Prefix("transformer_2.", "transformer_2"),
    Prefix("unet.", "unet"),
    Prefix("text_encoder.", "text_encoder"),
    Prefix("text_encoder_2.", "text_encoder_2"),
    Prefix("text_encoder_3.", "text_encoder_3"),
    # CLIP's text encoder has its modules below this name, or (transformers 5) without it.
    Prefix("text_model."),
    Prefix("text_model_", is_flat=True),
    Prefix("lora_unet_", is_flat=True),
    Prefix("lycoris_", is_flat=True),
    Prefix("lora_transformer_", is_flat=True),
    Prefix("lora_te_", "text_encoder", is_flat=True),
    Prefix("lora_te1_", "text_encoder", is_flat=True),
    Prefix("lora_te2_", "text_encoder_2", is_flat=True),
    Prefix("lora_te3_", "text_encoder_3", is_flat=True),
)

#: Prefixes that mean the denoiser under its other name: LoRAs use both.
ANY_DENOISER = ("transformer", "unet")

#: Replacements within a stem: attention processors of older diffusers held the factors.
STEM_ALIASES: tuple[tuple[str, str], ...] = ((".processor.", "."),)

#: Short names of the two denoisers of a model that has two (Wan 2.2).
EXPERTS = {"high": 0, "low": 1}
BOTH = "both"


@dataclass(frozen=True)
class MayLack:
    """Modules of a file that a model may lack, according to the file's authors.

    Attributes:
        class_name: class of the denoiser.
        pattern: regular expression for the module's name after prefixes.
        description: their meaning, for the plan's note.
        source: where the authors say so.
    """

    class_name: str
    pattern: str
    description: str
    source: str


MAY_LACK: tuple[MayLack, ...] = (
    MayLack(
        "WanTransformer3DModel",
        r"blocks[._]\d+[._](cross_attn|attn2)[._]"
        r"(k_img|v_img|norm_k_img|add_k_proj|add_v_proj|norm_added_k)|img_emb[._].+|"
        r"condition_embedder[._]image_embedder[._].+",
        "attention to a picture",
        "https://github.com/ModelTC/LightX2V/issues/417",
    ),
)
