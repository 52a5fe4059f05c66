"""Open-Sora 2.0's runs as formulas, with modules of other libraries.

T5 and CLIP are transformers'; the denoiser is diffusers' FLUX transformer, the autoencoder that of
diffusers' HunyuanVideo. Each Euler step computes all three branches. Nothing of the engine, the
stages, the sampler or the networks is used except the definition of the noise, and the DC-AE, which
no other library has.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from everyframe.families.opensora2 import vae as vaes
from everyframe.families.opensora2.checkpoint import (
    CLIP,
    DEEP_DENOISER,
    DEEP_VAE,
    DENOISER,
    HUNYUAN_VAE,
    T5,
)
from everyframe.samplers import noise
from helpers.references import flux
from helpers.tiny_checkpoints import opensora2 as tiny

PROMPT = "a red circle moves to the right"
SENT = f"{PROMPT}. 24 FPS. 4 motion score."
SIZES: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 9}
_SCALE = 0.476986


def text_states(folder: Path, texts: list[str]) -> tuple[Tensor, Tensor]:
    """T5's states, padding seen, and CLIP's pooled ones, the texts as one batch."""
    pieces = SentencePieceProcessor(model_file=str(folder / T5 / "spiece.model"))
    rows = torch.zeros(len(texts), 512, dtype=torch.long)
    for row, text in enumerate(texts):
        ids = [*pieces.encode(text), pieces.eos_id()]
        rows[row, : len(ids)] = torch.tensor(ids)
    t5 = T5EncoderModel(T5Config.from_pretrained(folder / T5)).eval()
    state: dict[str, Tensor] = {}
    for shard in sorted((folder / T5).glob("*.bin")):
        state |= torch.load(shard, weights_only=True)
    t5.load_state_dict(state)
    vocabulary = folder / CLIP
    tokenizer = CLIPTokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    ids = tokenizer(
        texts, max_length=77, padding="max_length", truncation=True, return_tensors="pt"
    )["input_ids"]
    config = json.loads((vocabulary / "config.json").read_text())["text_config"]
    clip = CLIPTextModel(CLIPTextConfig(**config)).eval()
    own = {n.removeprefix("text_model."): n for n in clip.state_dict()}
    tensors = load_file(vocabulary / "model.safetensors")
    clip.load_state_dict({
        own[short]: tensor for name, tensor in tensors.items()
        if (short := name.removeprefix("text_model.")) in own
    })  # fmt: skip
    with torch.no_grad():
        return t5(rows).last_hidden_state, clip(ids).pooler_output


def frames_of(folder: Path, *, steps: int, picture: Any = None) -> np.ndarray[Any, Any]:
    """Float frames of one video with seed 5, from a first picture if there is one."""
    config = tiny.VIDEO
    model = flux.flux_of(config, load_file(folder / DENOISER))
    vae: Any = AutoencoderKLHunyuanVideo(
        latent_channels=2, block_out_channels=(32, 32, 32, 32), layers_per_block=1
    ).eval()
    vae.load_state_dict(load_file(folder / HUNYUAN_VAE))
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    t5, clip = text_states(folder, [SENT, "", ""])
    x = noise.start_noise(5, (2, 3, 4, 6))[None]
    with torch.no_grad():
        cond = torch.zeros(1, 3, 3, 4, 6)
        if picture is not None:
            pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None] / 127.5 - 1
            given = vae.encode(pixels).latent_dist.mode() * _SCALE
            cond[:, :1, :1], cond[:, 1:, :1] = 1, given
        conds = torch.cat([cond, cond, torch.zeros_like(cond)])
        times = shifted(steps, tokens=6, frames=3)
        for step, (now, after) in enumerate(pairwise(times)):
            velocity = flux.velocity(
                model, config, x.expand(3, -1, -1, -1, -1), torch.full((3,), now), t5, clip, conds
            )
            x = x + combined(*velocity, step, steps, picture is not None) * (after - now)
        if picture is not None:
            x[:, :, :1] = given
        pixels = vae.decode(x / _SCALE).sample[0]
    return as_frames(pixels)


def deep_frames_of(folder: Path, *, steps: int) -> np.ndarray[Any, Any]:
    """Float frames of the variant with the DC-AE, from a prompt alone."""
    config = tiny.DEEP
    model = flux.flux_of(config, load_file(folder / DEEP_DENOISER))
    vae: Any = vaes.build(tiny.DCAE).eval()
    vae.load_state_dict(load_file(folder / DEEP_VAE))
    t5, clip = text_states(folder, [SENT, ""])
    x = noise.start_noise(5, (4, 2, 1, 2))[None]
    with torch.no_grad():
        nothing = torch.zeros(2, 5, 2, 1, 2)
        for step, (now, after) in enumerate(pairwise(shifted(steps, tokens=2, frames=2))):
            prompt, negative = flux.velocity(
                model, config, x.expand(2, -1, -1, -1, -1), torch.full((2,), now), t5, clip, nothing
            )
            x = x + combined(prompt, negative, negative, step, steps, False) * (after - now)
        pixels = vae.decoder(x)[0]
    return as_frames(pixels)


def shifted(steps: int, *, tokens: int, frames: int) -> list[float]:
    """Times from 1 to 0."""
    alpha = (1 + (tokens - 256) * 2 / 3840) * math.sqrt(frames)
    even = [1 - step / steps for step in range(steps + 1)]
    return [alpha * t / (1 + (alpha - 1) * t) for t in even]


def combined(
    prompt: Tensor, negative: Tensor, bare: Tensor, step: int, steps: int, is_conditioned: bool
) -> Tensor:
    """All three branches, with upstream's oscillation and fading."""
    is_odd = step >= 10 and step % 2
    text, picture = (1.0, 1.0) if is_odd else (7.5, 3.0)
    weight = torch.full((prompt.shape[1], 1, 1), picture)
    if picture > 1 and is_conditioned:
        weight = torch.linspace(1, 3 - 2 * step / steps, prompt.shape[1]).view(-1, 1, 1)
    return (bare + weight * (negative - bare) + text * (prompt - negative))[None]


def as_frames(pixels: Tensor) -> np.ndarray[Any, Any]:
    """Frames (T, H, W, 3) in 0..1."""
    frames: np.ndarray[Any, Any] = pixels.permute(1, 2, 3, 0).numpy() / 2 + 0.5
    return frames.clip(0, 1)
