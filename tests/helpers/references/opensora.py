"""Open-Sora's runs as formulas, with the modules as plain modules.

Text encoders are transformers', guidance is one doubled batch, the samplers' loops are the papers',
and `VideoVAE.decode` decodes. Nothing of the engine, the stages or the samplers is used except the
definition of the noise.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, T5EncoderModel

from everyframe.families.opensora.components import build_model
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae import ImageVAE, VideoVAE
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.samplers import noise
from helpers.tiny_checkpoints import opensora as tiny_opensora

PROMPT = "a red circle moves to the right"
#: What is left of it and of the score that 1.2 appends; see `test_prompts`.
CLEANED_1_2 = "a red circle moves to the right aesthetic score: 6.5."
#: Two pieces, and latents (6, 3, 5) that the patch of 2 does not divide.
SIZES: dict[str, Any] = {"height": 24, "width": 40, "num_frames": 20, "num_inference_steps": 4}
LATENTS = (1, 4, 6, 3, 5)


def start_noise(seed: int = 3) -> Tensor:
    """Start latents of `SIZES`."""
    return torch.randn(LATENTS, generator=torch.Generator().manual_seed(seed))


def text_states(folder: Path, prompt: str) -> tuple[Tensor, Tensor]:
    """T5's states (1, L, D) of a cleaned prompt, padded, and the mask of its tokens."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    padding = tiny_opensora.MAX_LENGTH - len(ids)
    mask = torch.tensor([[1] * len(ids) + [0] * padding])
    encoder = T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = encoder(torch.tensor([ids + [0] * padding]), attention_mask=mask)
    return states.last_hidden_state, mask.bool()


def load_denoiser(weights: Path, config: STDiTConfig | STDiT3Config) -> nn.Module:
    """The bare denoiser with the weights of that file."""
    module = build_model(config)
    state = load_file(weights) if weights.suffix == ".safetensors" else torch.load(weights)
    own = module.state_dict()
    module.load_state_dict({name: state[name] for name in own})
    return module.eval().requires_grad_(False)


def load_video_vae(folder: Path) -> VideoVAE:
    """The bare autoencoder of 1.2."""
    vae = VideoVAE(VideoVAEConfig.from_json(_config(folder)))
    vae.load_state_dict(load_file(folder / "model.safetensors"))
    return vae.eval().requires_grad_(False)


def frames_1_2(
    folder: Path,
    start: Tensor,
    *,
    steps: int = SIZES["num_inference_steps"],
    negative: str | None = None,
    known: Tensor | None = None,
    mask: Tensor | None = None,
    guidance: float = 7.0,
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Latents and float frames of one clip of 1.2; `mask` (1, T) is True where to make frames."""
    model = load_denoiser(folder / "model.safetensors", STDiT3Config.from_json(_config(folder)))
    states, tokens = text_states(folder / "text_encoder", CLEANED_1_2)
    null, null_tokens = model.y_embedder.y_embedding[None], tokens
    if negative is not None:
        null, null_tokens = text_states(folder / "text_encoder", negative)
    context = model.context(torch.cat([states, null]), torch.cat([tokens, null_tokens]))
    height, width, frames = SIZES["height"], SIZES["width"], SIZES["num_frames"]
    ratio = math.sqrt(height * width / 512**2) * math.sqrt(frames // 17 * 5)
    grid = [1 - i / steps for i in range(steps + 1)]
    t = [1000 * ratio * s / (1 + (ratio - 1) * s) for s in grid]
    make = torch.ones(1, start.shape[2], dtype=torch.bool) if mask is None else mask
    wide = make[:, None, :, None, None]
    z = start if known is None else torch.where(wide, start, known)
    for now, after in pairwise(t):
        answer = model(
            torch.cat([z, z]), torch.tensor([now, now]), context,
            fps=24.0, height=float(height), width=float(width), x_mask=make.expand(2, -1),
        )[:, :4]  # fmt: skip
        velocity = answer[1:] + guidance * (answer[:1] - answer[1:])
        z = torch.where(wide, z + velocity * (now - after) / 1000, z)
    pixels = load_video_vae(folder / "vae").decode(z, frames)[0]
    return z, (pixels.permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1).numpy()


def frames_1_0(weights: Path, *, seed: int, steps: int) -> np.ndarray[Any, Any]:
    """Float frames of 3 frames of 48x32 from 1.0: IDDPM from the paper, in float64 coefficients.

    Three of four channels are guided.
    """
    folder = weights.parent
    model = load_denoiser(weights, STDiTConfig.from_json(_config(folder)))
    states, tokens = text_states(folder / "text_encoder", PROMPT)
    null = model.y_embedder.y_embedding[None]
    context = model.context(torch.cat([states, null]), torch.cat([tokens, tokens]))
    shape = (4, 3, 4, 6)
    x = noise.start_noise(seed, shape)[None]
    beta = np.linspace(1e-4, 0.02, 1000)
    left = np.cumprod(1 - beta)
    used = [round(k * 999 / (steps - 1)) for k in range(steps)]
    for step, level in enumerate(reversed(range(steps))):
        bar, before = left[used[level]], left[used[level - 1]] if level else 1.0
        step_beta = 1 - bar / before
        answer = model(torch.cat([x, x]), torch.tensor([float(used[level])] * 2), context)
        cond, uncond = answer[:1], answer[1:]
        eps = cond[:, :4].clone()
        eps[:, :3] = uncond[:, :3] + 7.0 * (cond[:, :3] - uncond[:, :3])
        x0 = x / math.sqrt(bar) - math.sqrt(1 / bar - 1) * eps
        x = (
            step_beta * math.sqrt(before) / (1 - bar) * x0
            + (1 - before) * math.sqrt(1 - step_beta) / (1 - bar) * x
        )
        if level:
            low = math.log(step_beta * (1 - before) / (1 - bar))
            share = (cond[:, 4:] + 1) / 2
            log_variance = share * math.log(step_beta) + (1 - share) * low
            x = x + torch.exp(log_variance / 2) * noise.step_noise(seed, step, shape)
    vae = ImageVAE(ImageVAEConfig.from_json(_config(folder / "vae")))
    vae.module.load_state_dict(load_file(folder / "vae" / "diffusion_pytorch_model.safetensors"))
    with torch.no_grad():
        pixels = vae.eval().decode(x)[0].permute(1, 2, 3, 0)
    frames: np.ndarray[Any, Any] = (pixels / 2 + 0.5).clamp(0, 1).numpy()
    return frames


def _config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())
