"""Guess the model that a LoRA was made for, from the names and widths of its layers.

The guess is only used in messages. Widths are those of the released models' configs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from everyframe.adapters.lora_file import LoraFile


@dataclass(frozen=True)
class ModelSignature:
    """Layers by which a released model is recognised.

    Attributes:
        title: its name.
        layer: regular expression for the end of a layer's stem, with ``.`` for any separator.
        width: input channels of that layer; None for any.
        has: regular expression that some stem must contain; empty for none.
    """

    title: str
    layer: str
    width: int | None = None
    has: str = ""


_WAN = r"(?<!transformer.)blocks.\d+.(self_attn.q|attn1.to_q)"
_DIT = r"transformer_blocks.\d+.attn1.to_q"
_JOINT = r"(transformer_blocks.\d+.attn.to_q|double_blocks.\d+.img_attn.qkv)"
_UNET = r"(down_blocks|input_blocks).*attn2.to_k"
#: The first that fits is named, so special ones come first.
_SIGNATURES: tuple[ModelSignature, ...] = (
    ModelSignature("Stable Video Diffusion", _UNET, None, "temporal_transformer_blocks|time_stack"),
    ModelSignature("Stable Diffusion XL", _UNET, 2048),
    ModelSignature("Stable Diffusion 2", _UNET, 1024),
    ModelSignature("Stable Diffusion 1", _UNET, 768),
    ModelSignature("AnimateDiff's motion modules", r"motion_modules.*attention_blocks.*to_q"),
    ModelSignature("Wan 14B image to video", _WAN, 5120, "k_img|add_k_proj"),
    ModelSignature("Wan 14B", _WAN, 5120),
    ModelSignature("Wan 2.2 5B", _WAN, 3072),
    ModelSignature("Wan 1.3B", _WAN, 1536),
    ModelSignature("a model of Wan's kind", _WAN),
    ModelSignature("Mochi", _DIT, 3072, "add_q_proj"),
    ModelSignature("CogVideoX 5B", _DIT, 3072),
    ModelSignature("CogVideoX 2B", _DIT, 1920),
    ModelSignature("LTX-Video 2B", _DIT, 2048),
    ModelSignature("LTX-Video 13B or LTX-2", _DIT, 4096),
    ModelSignature("a model of the kind of LTX-Video or CogVideoX", _DIT),
    ModelSignature("CogVideoX in its original names", r"layers.\d+.attention.query_key_value"),
    ModelSignature("Mochi in its original names", r"blocks.\d+.attn.qkv_x"),
    ModelSignature("Qwen-Image", r"transformer_blocks.\d+.attn.to_q", 3072, "img_mlp"),
    ModelSignature("HunyuanVideo or FLUX.1", _JOINT, 3072),
    ModelSignature("a model of the kind of HunyuanVideo or FLUX.1", _JOINT),
    ModelSignature("a text encoder", r"(text_model|self_attn|SelfAttention).*(q_proj|\bq)"),
)


def identify(lora: LoraFile) -> str:
    """Title of the model that a LoRA seems to be made for; empty if no known model fits."""
    return identify_widths({module.stem: _width(module.shapes) for module in lora.modules})


def identify_widths(widths: Mapping[str, int | None]) -> str:
    """Title of the model with layers of these names and input channels; empty if unknown."""
    for known in _SIGNATURES:
        layer = re.compile(f"{known.layer}$")
        fits = any(
            layer.search(stem) and known.width in (None, width) for stem, width in widths.items()
        )
        if fits and any(re.search(known.has, stem) for stem in widths):
            return known.title
    return ""


def _width(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Input channels of a change, if its tensors determine them."""
    for role in ("down", "diff"):
        if len(shapes.get(role, ())) > 1:
            return math.prod(shapes[role][1:])
    return None
