"""Stage 1: the spatial autoencoder (diffusers' `AutoencoderKL`), trained on single frames.

It reduces a frame's sides by a factor of 8, to 8 channels. The object covers a twentieth of the
frame and would be lost in a plain mean, so its pixels have a larger weight in the loss. The PSNR
target applies to the object's pixels as well.

Latents are trained to be local: a cell far from the object must equal that of an empty frame.
Without this loss it does not, because `AutoencoderKL`'s group norms run over the whole frame and
spread the object's colour everywhere. A denoiser would then have to adapt every cell to one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS, Scene
from recipes.shapes import world
from recipes.shapes.loop import Task, autocast
from recipes.shapes.world import FORMATS, Format

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
GROUNDS = tuple(BACKGROUNDS)


def object_weight(pixels: Tensor) -> Tensor:
    """1 on the background, more on the object: by difference from the frame's corner pixel."""
    away = (pixels - pixels[..., :1, :1]).abs().amax(-3, keepdim=True)
    return 1 + OBJECT_WEIGHT * (away > 0.02)


def pixel_loss(out: Tensor, target: Tensor, square_weight: float = 1.0) -> Tensor:
    """Absolute plus squared errors: the first flattens areas, the second sharpens outlines."""
    error = out - target
    return (object_weight(target) * (error.abs() + square_weight * error.square())).mean()


def near_cells(pixels: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 1, h, w): 1 where the object is within 2 pixels of a cell."""
    on_object = (object_weight(pixels) > 1).float()
    return nn.functional.max_pool2d(on_object, CELL + 4, stride=CELL, padding=2)


def empty_frames(side: int, device: torch.device | str) -> Tensor:
    """A frame of each of `GROUNDS` without an object (N, 3, side, side)."""
    colours = torch.tensor([world.PALETTE[name] for name in GROUNDS], device=device) / 127.5 - 1
    return colours[:, :, None, None].expand(-1, -1, side, side).contiguous()


def grounds_of(scenes: Sequence[Scene], device: torch.device | str) -> Tensor:
    """(B,): which of `GROUNDS` each scene has."""
    return world.sent(torch.tensor([GROUNDS.index(scene.background) for scene in scenes]), device)


def strangeness(z: Tensor, empty: Tensor, near: Tensor) -> Tensor:
    """Difference between cells far from the object (1 - `near`) and those of an empty frame.

    It is relative to the latents' variance, since the training may choose their scale.
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


def build() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(**SIZES)


def task(num_steps: int = 8000, batch: int = 128, device: str = "cpu") -> Task:
    """The stage for `loop.train`; the score is the least PSNR. `batch` small frames a step, and
    a quarter as many large ones, which are as many pixels."""
    modules = nn.ModuleDict({"spatial": build()}).to(device)
    model: Any = modules["spatial"]

    def frames(form: Format, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        clips = world.random_clips(world.random_scenes(world.train_scenes(), count, rng), rng)
        times = torch.from_numpy(rng.uniform(size=(count, 1))).float()
        return world.draw(clips, form.side, times, device)[:, 0], grounds_of(clips.scenes, device)

    held = [frames(form, 128, np.random.default_rng(1))[0] for form in FORMATS]
    empty = [empty_frames(form.side, device) for form in FORMATS]
    counts = world.batch_sizes(batch)

    def draw(step: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([2, step])
        drawn = [frames(*each, rng) for each in zip(FORMATS, counts, strict=True)]
        return tuple(part for each in drawn for part in each)

    def loss(*drawn: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, shown = torch.zeros((), device=device), {}
        for pixels, grounds, ground in zip(drawn[::2], drawn[1::2], empty, strict=True):
            with autocast(device):
                posterior = model.encode(torch.cat([pixels, ground])).latent_dist
                out = model.decode(posterior.sample()[: len(pixels)]).sample
            z, of_empty = posterior.mean.float().split([len(pixels), len(GROUNDS)])
            shown["pixel"] = pixel_loss(out.float(), pixels)
            shown["strange"] = strangeness(z, of_empty[grounds], near_cells(pixels))
            kl = posterior.kl().float().mean() / z[0].numel()
            total = total + shown["pixel"] + 1e-4 * kl + LOCAL_WEIGHT * shown["strange"]
        return total / 2, shown

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        figures: dict[str, float] = {}
        for form, pixels in zip(FORMATS, held, strict=True):
            out = model.decode(model.encode(pixels).latent_dist.mode()).sample
            whole, on_object = psnr(out, pixels)
            figures |= {f"psnr_{form.side}": whole, f"object_{form.side}": on_object}
        return {"score": min(figures.values()), **figures}

    return Task(
        modules, draw, loss, validate, clips_per_step=sum(counts), num_steps=num_steps,
        learning_rate=2e-3, static=True,
    )  # fmt: skip
