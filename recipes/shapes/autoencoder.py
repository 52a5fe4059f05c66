"""Stage 1: the spatial autoencoder (diffusers' `AutoencoderKL`), trained on single frames.

64 x 64 pixels become 8 x 8 latents of 8 channels. The object is a twentieth of the frame and would
be lost in a plain mean, so its pixels weigh more; the bar is measured on it as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recipes.shapes import world
from recipes.shapes.loop import Task

SIZES: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [16, 16, 32, 64],
    "layers_per_block": 1,
    "latent_channels": 8,
    "norm_num_groups": 8,
    "mid_block_add_attention": False,
}
OBJECT_WEIGHT = 8.0


def to_torch(frames: world.Floats) -> Tensor:
    """Frames (..., H, W, 3) in 0..1 -> (..., 3, H, W) in -1..1."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(frames, -1, -3))) * 2 - 1


def object_weight(pixels: Tensor) -> Tensor:
    """1 on the background, more on the object: by difference from the frame's corner pixel."""
    away = (pixels - pixels[..., :1, :1]).abs().amax(-3, keepdim=True)
    return 1 + OBJECT_WEIGHT * (away > 0.02)


def pixel_loss(out: Tensor, target: Tensor) -> Tensor:
    error = out - target
    return (object_weight(target) * (error.abs() + error.square())).mean()


def psnr(out: Tensor, target: Tensor) -> tuple[float, float]:
    """Peak signal to noise in dB, whole frames and the object's pixels alone (-1..1 pixels)."""
    square = ((out.clamp(-1, 1) - target) / 2).square().mean(-3, keepdim=True)
    inside = object_weight(target) > 1
    whole, on_object = square.mean(), square[inside].mean()
    return float(-10 * whole.log10()), float(-10 * on_object.log10())


def random_frames(count: int, rng: np.random.Generator) -> Tensor:
    """One frame each of `count` training clips: (count, 3, H, W)."""
    clips = world.random_clips(world.train_scenes(), count, rng)
    return to_torch(world.draw(clips, rng.uniform(size=(count, 1)).astype(np.float32))[:, 0])


def build() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(**SIZES)


def task(num_steps: int = 4500, batch: int = 32) -> Task:
    """The stage for `loop.train`; the score is the worse of the two PSNRs."""
    modules = nn.ModuleDict({"spatial": build()})
    model: Any = modules["spatial"]
    held = random_frames(128, np.random.default_rng(1))

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels = random_frames(batch, np.random.default_rng([2, step]))
        with torch.autocast("cpu", torch.bfloat16):
            posterior = model.encode(pixels).latent_dist
            out = model.decode(posterior.sample()).sample
        pixel = pixel_loss(out.float(), pixels)
        return pixel + 1e-4 * posterior.kl().float().mean() / 512, {"pixel": pixel.item()}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        out = model.decode(model.encode(held).latent_dist.mode()).sample
        whole, on_object = psnr(out, held)
        return {"score": min(whole, on_object), "psnr": whole, "psnr_object": on_object}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        ema=0.995, validate_every=250,
    )  # fmt: skip
