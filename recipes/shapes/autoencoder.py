"""Stage 1: the spatial autoencoder (diffusers' `AutoencoderKL`), trained on single frames.

64 x 64 pixels become 8 x 8 latents of 8 channels. The object is a twentieth of the frame and would
be lost in a plain mean, so its pixels weigh more; the bar is measured on it as well.

Latents are trained to be local: a cell that the object isn't near must be what it is in an empty
frame. Left alone it is not, because `AutoencoderKL`'s group norms run over the whole frame and
carry the object's colour everywhere; a denoiser then has to get every cell right for one object.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS
from recipes.shapes import world
from recipes.shapes.loop import Task, autocast

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
LOCAL_WEIGHT = 0.1
CELL = 8  # pixels of a side of what one latent cell stands for


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


def near_cells(pixels: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 1, h, w): 1 where the object is within 2 pixels of a cell."""
    on_object = (object_weight(pixels) > 1).float()
    return nn.functional.max_pool2d(on_object, CELL + 4, stride=CELL, padding=2)


def empty_frames() -> tuple[list[str], Tensor]:
    """The backgrounds' names and a frame of each without an object (N, 3, H, W)."""
    names = list(BACKGROUNDS)
    colours = np.array([world.PALETTE[name] for name in names], np.float32) / 255
    flat = np.broadcast_to(colours[:, None, None], (len(names), world.SIDE, world.SIDE, 3))
    return names, to_torch(flat)


def strangeness(z: Tensor, empty: Tensor, near: Tensor) -> Tensor:
    """How much cells that the object is not near (1 - `near`) differ from an empty frame's.

    In variances of the latents, whose size the training is free to choose.
    """
    far = (1 - near).expand_as(z)
    mean: Tensor = ((z - empty).square() * far).sum() / (far.sum() * z.detach().var())
    return mean


def psnr(out: Tensor, target: Tensor) -> tuple[float, float]:
    """Peak signal to noise in dB, whole frames and the object's pixels alone (-1..1 pixels)."""
    square = ((out.clamp(-1, 1) - target) / 2).square().mean(-3, keepdim=True)
    inside = object_weight(target) > 1
    whole, on_object = square.mean(), square[inside].mean()
    return float(-10 * whole.log10()), float(-10 * on_object.log10())


def random_frames(count: int, rng: np.random.Generator) -> tuple[Tensor, list[str]]:
    """One frame each of `count` training clips (count, 3, H, W), and their backgrounds."""
    clips = world.random_clips(world.train_scenes(), count, rng)
    times = rng.uniform(size=(count, 1)).astype(np.float32)
    return to_torch(world.draw(clips, times)[:, 0]), [clip.scene.background for clip in clips]


def build() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(**SIZES)


def task(num_steps: int = 4500, batch: int = 32) -> Task:
    """The stage for `loop.train`; the score is the worse of the two PSNRs."""
    modules = nn.ModuleDict({"spatial": build()})
    model: Any = modules["spatial"]
    held, _ = random_frames(128, np.random.default_rng(1))
    names, empty = empty_frames()

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, grounds = random_frames(batch, np.random.default_rng([2, step]))
        with autocast():
            posterior = model.encode(torch.cat([pixels, empty])).latent_dist
            out = model.decode(posterior.sample()[:batch]).sample
        z, of_empty = posterior.mean.float().split([batch, len(names)])
        pixel = pixel_loss(out.float(), pixels)
        away = strangeness(z, of_empty[[names.index(one) for one in grounds]], near_cells(pixels))
        total = pixel + 1e-4 * posterior.kl().float().mean() / 512 + LOCAL_WEIGHT * away
        return total, {"pixel": pixel.item(), "strange": away.item()}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        out = model.decode(model.encode(held).latent_dist.mode()).sample
        whole, on_object = psnr(out, held)
        return {"score": min(whole, on_object), "psnr": whole, "psnr_object": on_object}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        ema=0.995, validate_every=250,
    )  # fmt: skip
