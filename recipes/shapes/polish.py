"""Stage 5: both decoders of the autoencoder trained on, the encoders left as they are.

Latents stay what the denoiser was trained on, so this can be done after it, or beside it. Frames
are decoded from cached latents and compared with what was drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recipes.shapes import autoencoder, latents, temporal, world
from recipes.shapes.loop import Task, autocast, num_ranks, rank

FRAMES = 5  # frames of each clip that are decoded to pixels


def task(work: Path, num_steps: int = 2000, batch: int = 16) -> Task:
    """The stage for `loop.train`; starts from the best of stage 2 and the latents of stage 4."""
    vae = latents.trained_vae(work, polished=False)
    latents.normalise(vae)
    cached = latents.cached_latents(work, vae, latents.NUM_CACHED)
    clips, rows_of = latents.drawn_clips(latents.NUM_CACHED)
    spatial, inner = vae.spatial_vae.module, vae.temporal_vae
    trained = nn.ModuleList(
        [spatial.decoder, spatial.post_quant_conv, inner.decoder, inner.post_quant_conv]
    )
    vae.requires_grad_(False)
    trained.requires_grad_(True)
    share = batch // num_ranks()
    factor = vae.config.spatial.scaling_factor
    held_clips = world.random_clips(world.train_scenes(), 24, np.random.default_rng(12))
    held = temporal.clip_frames(held_clips)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        draws = np.random.default_rng([41, step, rank()])
        chosen = draws.integers(len(clips), size=share)
        z = cached.clips[rows_of[chosen]].float()
        z[: share // 2, :, :1] = cached.first[rows_of[chosen[: share // 2]]].float()
        z = z + temporal.NOISE * torch.randn_like(z)
        times = np.stack([draws.permutation(17)[:FRAMES] for _ in chosen])
        target = world.draw([clips[i] for i in chosen], times.astype(np.float32) / 16)
        with autocast():
            out = inner.decode(z * vae.scale + vae.shift, 17)
            picked = torch.stack([out[i, :, times[i]] for i in range(share)])
            pixels = spatial.decode(picked.transpose(1, 2).flatten(0, 1) / factor).sample
        loss = autoencoder.pixel_loss(pixels.float(), autoencoder.to_torch(target).flatten(0, 1))
        return loss, {"pixel": loss.item()}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        return temporal.measure(vae, held)

    return Task(
        nn.ModuleDict({"vae": vae}), loss, validate, clips_per_step=batch, num_steps=num_steps,
        learning_rate=3e-4, ema=0.995, validate_every=200,
    )  # fmt: skip
