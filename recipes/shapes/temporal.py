"""Stage 2: the temporal stage of `VideoVAE`, trained on cached latents of the spatial stage.

17 frames become 5 latent frames; the first of them stands for the first frame alone. An image that
is given is encoded as a video of one frame, so such encodings must equal the first latent frame of
a whole clip: they are trained to, and are put in its place in half of the batch. Cells that the
object never comes near are trained to be an empty clip's, as in the spatial stage. The spatial
decoder is trained along, on pixels of a few frames; the spatial encoder is left as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.families.opensora.vae import (
    ImageVAEConfig,
    TemporalVAEConfig,
    VideoVAE,
    VideoVAEConfig,
)
from recipes.shapes import autoencoder, world
from recipes.shapes.loop import Task, autocast, load_best

CHANNELS = 12
TEMPORAL = TemporalVAEConfig(
    in_out_channels=autoencoder.SIZES["latent_channels"],
    latent_embed_dim=CHANNELS,
    embed_dim=CHANNELS,
    filters=24,
    num_res_blocks=1,
    channel_multipliers=(1, 2, 2),
    temporal_downsample=(True, True),
    num_groups=8,
)
NOISE = 0.05  # of latents that the decoder learns to bear: a denoiser's are never exact
NUM_CACHED = 2000
LOCAL_WEIGHT = 0.2


def build(scaling_factor: float = 1.0) -> VideoVAE:
    """Untrained, without shift and scale (they are measured once it is trained)."""
    return VideoVAE(
        VideoVAEConfig(
            spatial=ImageVAEConfig(autoencoder.SIZES, scaling_factor, micro_batch_size=17),
            temporal=TEMPORAL,
            shift=(0.0,) * CHANNELS,
            scale=(1.0,) * CHANNELS,
        )
    )


def clip_frames(clips: list[world.Clip]) -> Tensor:
    """Clips -> (B, 3, T, H, W) in -1..1."""
    return autoencoder.to_torch(world.draw(clips)).transpose(1, 2).contiguous()


@torch.no_grad()
def spatial_latents(vae: VideoVAE, clips: list[world.Clip]) -> Tensor:
    """(B, C, T, h, w) of the spatial stage, in float16 to keep many of them."""
    parts = []
    for start in range(0, len(clips), 16):
        pixels = clip_frames(clips[start : start + 16])
        with autocast():
            flat = pixels.transpose(1, 2).flatten(0, 1)
            latents = vae.spatial_vae.module.encode(flat).latent_dist.mode()
        parts.append(latents.unflatten(0, (len(pixels), -1)).transpose(1, 2).half())
    return torch.cat(parts)


def task(work: Path, num_steps: int = 1500, batch: int = 16) -> Task:
    """The stage for `loop.train`; starts from the best spatial autoencoder in `work`."""
    spatial: Any = nn.ModuleDict({"spatial": autoencoder.build()})
    load_best(spatial, work / "autoencoder")
    vae = build()
    vae.spatial_vae.module.load_state_dict(spatial["spatial"].state_dict())
    rng = np.random.default_rng(11)
    clips = world.random_clips(world.train_scenes(), NUM_CACHED, rng)
    cached = spatial_latents(vae, clips)
    mean = cached[:200].float().mean(dim=(0, 2, 3, 4))[:, None, None, None]
    std = cached[:200].float().std(dim=(0, 2, 3, 4))[:, None, None, None]
    vae = _scaled(vae, 1 / float(std.mean()))
    factor = vae.config.spatial.scaling_factor
    (work / "temporal").mkdir(exist_ok=True)
    (work / "temporal" / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    near = torch.cat([_near(clips[i : i + 50]) for i in range(0, NUM_CACHED, 50)])
    names, empty = autoencoder.empty_frames()
    with torch.no_grad():
        still = vae.spatial_vae.module.encode(empty).latent_dist.mode() * factor
    empty_clips = still[:, :, None].expand(-1, -1, world.NUM_FRAMES, -1, -1)
    grounds = [names.index(clip.scene.background) for clip in clips]
    for parameter in vae.spatial_vae.module.encoder.parameters():
        parameter.requires_grad_(False)
    held_clips = world.random_clips(world.train_scenes(), 24, np.random.default_rng(12))
    held = clip_frames(held_clips)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        draws = np.random.default_rng([13, step])
        rows = draws.integers(NUM_CACHED, size=batch)
        x = cached[rows].float() * factor
        weight = _object_cells(x / factor, mean, std)
        with autocast():
            means, log_variance = vae.temporal_vae.moments(torch.cat([x, empty_clips]))
            z, of_empty = means.split([batch, len(names)])
            z_image = vae.temporal_vae.encode(x[:, :, :1])
            swapped = torch.cat([z_image[: batch // 2], z[batch // 2 :, :, :1]])
            mixed = torch.cat([swapped, z[:, :, 1:]], dim=2)
            out = vae.temporal_vae.decode(mixed + NOISE * torch.randn_like(mixed), 17)
            alone = vae.temporal_vae.decode(z_image, 1)
        z, log_variance = z.float(), log_variance[:batch].float()
        latent = (weight * (out.float() - x).square()).mean()
        first = (weight[:, :, :1] * (alone.float() - x[:, :, :1]).square()).mean()
        same = (z_image.float() - z[:, :, :1]).square().mean()
        own_empty = of_empty.float()[[grounds[row] for row in rows]]
        away = autoencoder.strangeness(z, own_empty, near[rows])
        kl = 0.5 * (z.square() + log_variance.exp() - 1 - log_variance).mean()
        times = draws.integers(1, 17, size=batch)
        chosen = torch.cat([out[range(batch), :, times], out[: batch // 2, :, 0], alone[:8, :, 0]])
        clip_rows = [*rows, *rows[: batch // 2], *rows[:8]]
        when = np.concatenate([times, np.zeros(batch // 2 + 8)]).astype(np.float32) / 16
        target = autoencoder.to_torch(
            world.draw([clips[i] for i in clip_rows], when[:, None])[:, 0]
        )
        with autocast():
            pixels = vae.spatial_vae.module.decode(chosen / factor).sample
        pixel = autoencoder.pixel_loss(pixels.float(), target)
        total = latent + 0.25 * first + 0.5 * same + 2 * pixel + 2e-3 * kl + LOCAL_WEIGHT * away
        return total, {
            "latent": latent.item(), "pixel": pixel.item(), "same": same.item(), "kl": kl.item(),
            "strange": away.item(),
        }  # fmt: skip

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        return measure(vae, held)

    return Task(
        nn.ModuleDict({"vae": vae}), loss, validate, clips_per_step=batch, num_steps=num_steps,
        learning_rate=2e-3, ema=0.99, validate_every=150,
    )  # fmt: skip


def _near(clips: list[world.Clip]) -> Tensor:
    """(B, 1, 1, h, w): 1 where the object comes near a cell in any frame of a clip."""
    frames = clip_frames(clips).transpose(1, 2)
    near = autoencoder.near_cells(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
    return near.amax(1)[:, None]


@torch.no_grad()
def measure(vae: VideoVAE, pixels: Tensor) -> dict[str, float]:
    """PSNR of clips (B, 3, 17, H, W) coded whole; and of the first frame when given as an image."""
    z = vae.encode(pixels)
    by_frame = pixels.transpose(1, 2)
    whole, on_object = autoencoder.psnr(vae.decode(z, 17).transpose(1, 2), by_frame)
    z[:, :, :1] = vae.encode(pixels[:, :, :1])
    first, first_object = autoencoder.psnr(
        vae.decode(z, 17).transpose(1, 2)[:, :1], by_frame[:, :1]
    )
    return {
        "score": min(whole, on_object, first, first_object), "psnr": whole,
        "psnr_object": on_object, "first": first, "first_object": first_object,
    }  # fmt: skip


def _scaled(vae: VideoVAE, scaling_factor: float) -> VideoVAE:
    again = build(scaling_factor)
    again.load_state_dict(vae.state_dict())
    return again


def _object_cells(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """More weight for cells that differ from the corner's, where the background is."""
    away = ((x - x[..., :1, :1]) / std).abs().amax(1, keepdim=True)
    weight: Tensor = 1 + 4 * (away > 0.3)
    return weight.expand_as(x)
