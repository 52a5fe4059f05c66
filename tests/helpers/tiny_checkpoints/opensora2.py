"""A tiny random Open-Sora 2.0 in upstream's own folder layout, written to disk for tests.

It goes through the same finding, loading and running code as a real one; only its sizes differ:
one safetensors file each without a config, T5 as two pickled shards, all of CLIP in one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everyframe.families.opensora2 import vae as vaes
from everyframe.families.opensora2.checkpoint import (
    CLIP,
    DEEP_DENOISER,
    DEEP_VAE,
    DENOISER,
    FLUX,
    FLUX_VAE,
    HUNYUAN_VAE,
    T5,
)
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.first_picture import build_vae
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.families.opensora2.vae_config import DCAEConfig, HunyuanVAEConfig
from helpers.tiny_checkpoints import opensora as tiny_opensora

CLIP_WIDTH = 12
VIDEO = MMDiTConfig(
    in_channels=8, vec_in_dim=CLIP_WIDTH, context_in_dim=tiny_opensora.CAPTION_CHANNELS,
    hidden_size=48, num_heads=3, depth=2, depth_single_blocks=2, axes_dim=(4, 6, 6),
)  # fmt: skip
DEEP = MMDiTConfig(
    in_channels=4, vec_in_dim=CLIP_WIDTH, context_in_dim=tiny_opensora.CAPTION_CHANNELS,
    hidden_size=48, num_heads=3, depth=1, depth_single_blocks=1, axes_dim=(4, 6, 6), patch_size=1,
)  # fmt: skip
FIRST = MMDiTConfig(
    in_channels=16, vec_in_dim=CLIP_WIDTH, context_in_dim=tiny_opensora.CAPTION_CHANNELS,
    hidden_size=32, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=(4, 6, 6),
    guidance_embed=True, cond_embed=False, fused_qkv=True, use_liger_rope=False,
)  # fmt: skip
HUNYUAN = HunyuanVAEConfig(
    latent_channels=2, block_out_channels=(32, 32, 32, 32), layers_per_block=1
)
DCAE = DCAEConfig(
    latent_channels=4, widths=(8, 8, 8, 32, 32, 32), encoder_depths=(1,) * 6,
    decoder_depths=(1,) * 6,
)  # fmt: skip
FIRST_VAE = {
    "block_out_channels": [32, 32, 32, 32], "layers_per_block": 1, "latent_channels": 4,
}  # fmt: skip
CLIP_TEXT: dict[str, Any] = {
    "hidden_size": CLIP_WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
}  # fmt: skip


def opensora2(folder: Path, *, seed: int = 0) -> Path:
    """The whole folder, FLUX too."""
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / DENOISER, MMDiT(VIDEO), seed)
    model(folder / HUNYUAN_VAE, vaes.build(HUNYUAN), seed + 1)
    encoders(folder, seed=seed + 2)
    flux(folder, seed=seed + 4)
    return folder


def opensora2_dcae(folder: Path, *, seed: int = 0) -> Path:
    """The variant with the DC-AE, without FLUX."""
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / DEEP_DENOISER, MMDiT(DEEP), seed)
    model(folder / DEEP_VAE, vaes.build(DCAE), seed + 1)
    encoders(folder, seed=seed + 2)
    return folder


def model(path: Path, module: nn.Module, seed: int) -> None:
    """One file of the module's tensors."""
    save_file(brought(tiny_opensora.randomised(module, seed)), path)


def brought(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Modulation strong enough that every part shows in the result."""
    strong = {".lin.": 3, "adaLN": 3, "vector_in": 3, "time_in": 3, "cond_in": 20}
    return {
        name: tensor * next((by for mark, by in strong.items() if mark in name), 1)
        for name, tensor in tensors.items()
    }


def encoders(folder: Path, *, seed: int = 2) -> None:
    """T5 and CLIP with their tokenizers."""
    tiny_opensora.deepfloyd_t5(folder / T5, seed=seed)
    clip(folder / CLIP, seed=seed + 1)


def clip(folder: Path, *, seed: int = 3) -> None:
    """CLIP as its hub folder has it: one config of both halves, the prefixed text half's tensors
    with those of the image half, and a byte-pair tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModel

    folder.mkdir(parents=True, exist_ok=True)
    # A byte-pair vocabulary of letters: each alone and at the end of a word.
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    text = {
        **CLIP_TEXT, "vocab_size": len(vocabulary), "bos_token_id": len(vocabulary) - 2,
        "eos_token_id": 2,
    }  # fmt: skip
    config = {"model_type": "clip", "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    built: Any = CLIPTextModel(CLIPTextConfig(**text))
    tensors = {
        f"text_model.{name.removeprefix('text_model.')}": tensor.contiguous()
        for name, tensor in built.state_dict().items()
    }
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    tensors["vision_model.embeddings.class_embedding"] = torch.zeros(8)
    tensors["logit_scale"] = torch.zeros(())
    save_file(tensors, folder / "model.safetensors")


def flux(folder: Path, *, seed: int = 4) -> None:
    """FLUX.1's two files, with the names that Black Forest Labs gave the autoencoder's tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / FLUX, MMDiT(FIRST), seed)
    tensors = tiny_opensora.randomised(build_vae(FIRST_VAE), seed + 1)
    save_file({ldm_name(n): ldm_tensor(n, t) for n, t in tensors.items()}, folder / FLUX_VAE)


def diffusers_flux(folder: Path, source: Path) -> Path:
    """The FLUX.1 of `source` in diffusers' layout, its denoiser in shards."""
    from helpers.references.flux import flux_of

    denoiser: Any = flux_of(FIRST, load_file(source / FLUX))
    denoiser.save_pretrained(folder / "transformer", max_shard_size="100KB")
    vae, stored = build_vae(FIRST_VAE), load_file(source / FLUX_VAE)
    vae.load_state_dict({
        name: stored[ldm_name(name)].view(tensor.shape) for name, tensor in vae.state_dict().items()
    })  # fmt: skip
    saved: Any = vae
    saved.save_pretrained(folder / "vae")
    return folder


def ldm_name(name: str) -> str:
    """Black Forest Labs' name for a tensor of diffusers' autoencoder, written out by hand."""
    coder, *rest = name.split(".")
    where = rest[0]
    if where == "mid_block":
        kind, number, *tail = rest[1:]
        if kind == "resnets":
            return f"{coder}.mid.block_{int(number) + 1}.{'.'.join(tail)}"
        layer = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out": "proj_out"}
        return f"{coder}.mid.attn_1.{layer[tail[0]]}.{tail[-1]}"
    if where == "conv_norm_out":
        return f"{coder}.norm_out.{rest[-1]}"
    if where in ("down_blocks", "up_blocks"):
        level, kind, number, *tail = rest[1:]
        side = "down" if where == "down_blocks" else "up"
        level = level if side == "down" else str(3 - int(level))
        if kind != "resnets":
            return f"{coder}.{side}.{level}.{side}sample.{'.'.join(tail)}"
        last = ".".join(tail).replace("conv_shortcut", "nin_shortcut")
        return f"{coder}.{side}.{level}.block.{number}.{last}"
    return name


def ldm_tensor(name: str, tensor: Tensor) -> Tensor:
    """Matrices of the attention are kernels of one position there."""
    is_matrix = "attentions" in name and tensor.ndim == 2
    return tensor[:, :, None, None].contiguous() if is_matrix else tensor
