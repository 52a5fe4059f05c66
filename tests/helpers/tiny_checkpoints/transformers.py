"""Small diffusers transformers in float64, and the arguments of their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from helpers.tiny_checkpoints import opensora as tiny_opensora

SHORT, LONG = 5, 7


def randn(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wan(**more: Any) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=8, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        **more,
    )  # fmt: skip


def ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, num_layers=2,
        cross_attention_dim=24, caption_channels=8,
    )  # fmt: skip


def cogvideox(*, rotary: bool) -> nn.Module:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=8, num_layers=2, sample_width=10, sample_height=6,
        sample_frames=9, max_text_seq_length=LONG, use_rotary_positional_embeddings=rotary,
    )  # fmt: skip


def hunyuan() -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=12, num_layers=2,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1,
        guidance_embeds=True, text_embed_dim=8, pooled_projection_dim=6, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wan": wan,
    "wan of a picture": lambda: wan(image_dim=6, added_kv_proj_dim=36),
    "ltx": ltx,
    "cogvideox": lambda: cogvideox(rotary=False),
    "cogvideox 5b": lambda: cogvideox(rotary=True),
    "hunyuan": hunyuan,
}


@cache
def model_of(name: str) -> Any:
    """In float64, every parameter drawn, so that no branch is silent."""
    model = MODELS[name]()
    model.load_state_dict(tiny_opensora.randomised(model, 0))
    return model.double().eval().requires_grad_(False)


def of_wan(frames: int, height: int, width: int, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, frames, height, width),
        "timestep": torch.linspace(100, 900, batch),
        "encoder_hidden_states": randn(batch, LONG, 8, seed=3),
        **more,
    }


def of_ltx(frames: int, height: int, width: int, **more: Any) -> dict[str, Any]:
    lengths = torch.tensor([SHORT, LONG])
    return {
        "hidden_states": randn(2, frames * height * width, 4),
        "encoder_hidden_states": randn(2, LONG, 8, seed=3),
        "timestep": torch.tensor([300.0, 300.0]),
        "encoder_attention_mask": (torch.arange(LONG) < lengths[:, None]).long(),
        "num_frames": frames, "height": height, "width": width,
        "rope_interpolation_scale": (1 / 3, 32, 32),
        **more,
    }  # fmt: skip


def of_cogvideox(frames: int, height: int, width: int, *, rotary: bool) -> dict[str, Any]:
    tokens = frames * (height // 2) * (width // 2)
    angles = randn(tokens, 8, seed=4).repeat_interleave(2, dim=1)
    return {
        "hidden_states": randn(2, frames, 4, height, width),
        "encoder_hidden_states": randn(2, LONG, 8, seed=3),
        "timestep": torch.tensor([300.0, 300.0]),
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }


def of_hunyuan(frames: int, height: int, width: int) -> dict[str, Any]:
    lengths = torch.tensor([SHORT, LONG])
    return {
        "hidden_states": randn(2, 4, frames, height, width),
        "timestep": torch.tensor([300.0, 700.0]),
        "encoder_hidden_states": randn(2, LONG, 8, seed=3),
        "encoder_attention_mask": (torch.arange(LONG) < lengths[:, None]).long(),
        "pooled_projections": randn(2, 6, seed=4),
        "guidance": torch.tensor([6000.0, 6000.0]),
    }
