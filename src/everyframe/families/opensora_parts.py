"""Recognise parts of every version of Open-Sora by tensor names. Reads headers; no torch.

Messages use it to name the file that was given in place of another part.
"""

from __future__ import annotations

from pathlib import Path

from everyframe.checkpoints.safetensors_header import read_header

VIDEO_PART, FLUX_PART = "Open-Sora 2.0's denoiser", "FLUX.1's denoiser"
IMAGE_VAE_PART = "an autoencoder of single pictures, as Open-Sora 1.0 has it"
VAE_1_2_PART = "Open-Sora 1.2's autoencoder"
FLUX_VAE_PART = "FLUX.1's autoencoder"
HUNYUAN_PART, DEEP_PART = "HunyuanVideo's autoencoder", "Open-Sora 2.0's DC-AE"

#: The autoencoder of each older version.
VAE_PARTS = {"1.0": IMAGE_VAE_PART, "1.2": VAE_1_2_PART}

#: What a file with tensors of these names holds; the first that fits.
_PARTS = (
    (FLUX_PART, ("guidance_in.in_layer.weight", "double_blocks.0.img_attn.norm.query_norm.scale")),
    (VIDEO_PART, ("img_in.weight", "double_blocks.0.img_attn.q_proj.weight")),
    (VIDEO_PART, ("cond_in.weight", "double_blocks.0.img_attn.norm.query_norm.scale")),
    # FLUX.1-schnell, which takes no guidance scale.
    (FLUX_PART, ("img_in.weight", "double_blocks.0.img_attn.qkv.weight")),
    (DEEP_PART, ("encoder.project_in.conv.weight", "decoder.project_in.main.conv.weight")),
    (HUNYUAN_PART, ("encoder.conv_in.conv.weight", "quant_conv.weight", "post_quant_conv.weight")),
    (FLUX_VAE_PART, ("encoder.down.0.block.0.conv1.weight", "decoder.conv_in.weight")),
    ("Open-Sora 1.2's denoiser", ("spatial_blocks.0.scale_shift_table",)),
    ("Open-Sora 1.0's denoiser", ("blocks.0.attn_temp.qkv.weight",)),
    (VAE_1_2_PART, ("spatial_vae.module.encoder.conv_in.weight",)),
    (IMAGE_VAE_PART,
     ("encoder.conv_in.weight", "encoder.down_blocks.0.resnets.0.conv1.weight")),
)  # fmt: skip


def part_of(path: Path) -> str | None:
    """What a weights file holds, in words, or None if no tensor tells."""
    if path.suffix != ".safetensors":
        return None  # upstream has no other kind, and names of a pickle take torch to read
    names = set(read_header(path).tensors)
    return next((part for part, marks in _PARTS if names.issuperset(marks)), None)
