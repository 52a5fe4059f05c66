"""Stage 2: the temporal stage of `VideoVAE`, trained on the spatial stage's latents of clips.

17 frames become 5 latent frames, the first of which encodes only the first frame. A given image is
encoded as a video of one frame, and must equal the first latent frame of a whole clip. A loss term
trains this, and in half of the batch the image's encoding replaces that latent frame. Cells far
from the object are trained to equal those of an empty clip, as in the spatial stage. The spatial
decoder is trained too, on pixels of a few frames; the spatial encoder is frozen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import Scene
from everyframe.families.opensora.vae import VideoVAE
from everyframe.families.opensora.vae_config import (
    ImageVAEConfig,
    TemporalVAEConfig,
    VideoVAEConfig,
)
from recipes.shapes import autoencoder, world
from recipes.shapes.autoencoder import GROUNDS, grounds_of
from recipes.shapes.loop import Task, autocast, load_best
from recipes.shapes.world import FORMATS, SMALL, Format

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
PIECE = 17  # frames that are coded together; a longer clip is coded piece by piece
NOISE = 0.05  # of latents that the decoder learns to bear: a denoiser's are never exact
LOCAL_WEIGHT = 0.2
NUM_DECODED = 3  # frames of each clip that are decoded to pixels


def build(scaling_factor: float = 1.0) -> VideoVAE:
    """Untrained, without shift and scale (they are measured once it is trained)."""
    return VideoVAE(
        VideoVAEConfig(
            spatial=ImageVAEConfig(autoencoder.SIZES, scaling_factor, micro_batch_size=PIECE),
            temporal=TEMPORAL,
            shift=(0.0,) * CHANNELS,
            scale=(1.0,) * CHANNELS,
        )
    )


def clip_frames(clips: world.Clips, form: Format, device: torch.device | str = "cpu") -> Tensor:
    """Clips -> (B, 3, T, H, W) in -1..1."""
    return world.draw_whole(clips, form, device).transpose(1, 2)


def random_pieces(
    scenes: Sequence[Scene], form: Format, rng: np.random.Generator
) -> tuple[world.Clips, Tensor]:
    """A clip of each scene, and when in it (B, 17) the frames of one of its pieces are."""
    starts = rng.integers(form.num_frames // PIECE, size=(len(scenes), 1)) * PIECE
    times = torch.from_numpy(starts + np.arange(PIECE)).float() / (form.num_frames - 1)
    return world.random_clips(scenes, rng), times


@torch.no_grad()
def spatial_latents(vae: VideoVAE, frames: Tensor) -> Tensor:
    """What the spatial stage makes of (B, T, 3, H, W): (B, C, T, h, w), scaled, float32."""
    with autocast(frames.device):
        z = vae.spatial_vae.module.encode(frames.flatten(0, 1)).latent_dist.mode()
    z = z.float() * vae.config.spatial.scaling_factor
    return z.unflatten(0, frames.shape[:2]).transpose(1, 2)


def task(work: Path, num_steps: int = 6000, batch: int = 32, device: str = "cpu") -> Task:
    """The stage for `loop.train`; starts from the best spatial autoencoder in `work`.

    `batch` small clips a step, and a quarter as many pieces of large ones.
    """
    spatial: Any = nn.ModuleDict({"spatial": autoencoder.build()}).to(device)
    load_best(spatial, work / "autoencoder")
    vae = build().to(device)
    vae.spatial_vae.module.load_state_dict(spatial["spatial"].state_dict())
    counts, scenes = world.batch_sizes(batch), world.train_scenes()

    def pieces(form: Format, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        clips, times = random_pieces(world.random_scenes(scenes, count, rng), form, rng)
        return world.draw(clips, form.side, times, device), grounds_of(clips.scenes, device)

    some = spatial_latents(vae, pieces(SMALL, 200, np.random.default_rng(11))[0])
    factor = 1 / float(some.std(dim=(0, 2, 3, 4)).mean())
    std_C111 = factor * some.std(dim=(0, 2, 3, 4))[:, None, None, None]
    (work / "temporal").mkdir(exist_ok=True)
    (work / "temporal" / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    vae = _scaled(vae, factor)
    vae.spatial_vae.module.encoder.requires_grad_(False)
    vae.spatial_vae.module.quant_conv.requires_grad_(False)
    empty = {
        form: spatial_latents(vae, _standing(autoencoder.empty_frames(form.side, device)))
        for form in FORMATS
    }
    held = {form: held_clips(form, device) for form in FORMATS}

    def draw(step: int) -> tuple[Tensor, ...]:
        rng, drawn = np.random.default_rng([13, step]), []
        for form, count in zip(FORMATS, counts, strict=True):
            times = rng.permuted(np.tile(np.arange(1, PIECE), (count, 1)), axis=1)[:, :NUM_DECODED]
            chosen = world.sent(torch.from_numpy(np.pad(times, ((0, 0), (1, 0)))), device)
            drawn += [*pieces(form, count, rng), chosen]
        return tuple(drawn)

    def of_format(
        form: Format, frames: Tensor, grounds: Tensor, chosen: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`chosen` (B, n) frames of each piece are decoded to pixels, the first one among them."""
        count, x = len(frames), spatial_latents(vae, frames)
        near = autoencoder.near_cells(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).amax(1)
        weight = _object_cells(x, std_C111)
        with autocast(device):
            means, log_variance = vae.temporal_vae.moments(torch.cat([x, empty[form]]))
            z, of_empty = means.split([count, len(GROUNDS)])
            z_image = vae.temporal_vae.encode(x[:, :, :1])
            swapped = torch.cat([z_image[: count // 2], z[count // 2 :, :, :1]])
            mixed = torch.cat([swapped, z[:, :, 1:]], dim=2)
            out = vae.temporal_vae.decode(mixed + NOISE * torch.randn_like(mixed), PIECE)
            alone = vae.temporal_vae.decode(z_image, 1)
        z, log_variance = z.float(), log_variance[:count].float()
        latent = (weight * (out.float() - x).square()).mean()
        first = (weight[:, :, :1] * (alone.float() - x[:, :, :1]).square()).mean()
        same = (z_image.float() - z[:, :, :1]).square().mean()
        away = autoencoder.strangeness(z, of_empty.float()[grounds], near[:, :, None])
        kl = 0.5 * (z.square() + log_variance.exp() - 1 - log_variance).mean()
        rows = torch.arange(count, device=device)[:, None]
        picked = out.transpose(1, 2)[rows, chosen].flatten(0, 1)
        with autocast(device):
            decoded = torch.cat([picked, alone[: count // 2, :, 0]]) / factor
            pixels = vae.spatial_vae.module.decode(decoded).sample
        target = torch.cat([frames[rows, chosen].flatten(0, 1), frames[: count // 2, 0]])
        pixel = autoencoder.pixel_loss(pixels.float(), target)
        total = latent + 0.25 * first + 0.5 * same + 2 * pixel + 2e-3 * kl + LOCAL_WEIGHT * away
        return total, {"latent": latent, "pixel": pixel, "same": same, "kl": kl, "strange": away}

    def loss(*drawn: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        (small, shown), (large, _) = (
            of_format(form, *drawn[i : i + 3]) for form, i in zip(FORMATS, (0, 3), strict=True)
        )
        return (small + large) / 2, shown

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        return measured(vae, held)

    return Task(
        nn.ModuleDict({"vae": vae}), draw, loss, validate, clips_per_step=sum(counts),
        num_steps=num_steps, learning_rate=2e-3, static=True,
    )  # fmt: skip


def trained(work: Path, stage: str, device: str = "cpu") -> VideoVAE:
    """The autoencoder with the best weights of a stage."""
    kept = json.loads((work / "temporal" / "scaling.json").read_text())
    vae = build(kept["scaling_factor"]).to(device)
    load_best(nn.ModuleDict({"vae": vae}), work / stage)
    return vae


def held_clips(form: Format, device: torch.device | str) -> Tensor:
    """24 clips (B, 3, T, H, W) that a coder is measured on while it is trained."""
    rng = np.random.default_rng(12)
    clips = world.random_clips(world.random_scenes(world.train_scenes(), 24, rng), rng)
    return clip_frames(clips, form, device)


def measured(vae: VideoVAE, held: dict[Format, Tensor]) -> dict[str, float]:
    """What `measure` finds in each format, and as ``score`` the least of it."""
    found: dict[str, float] = {}
    for form, pixels in held.items():
        found |= {f"{name}_{form.side}": each for name, each in measure(vae, pixels).items()}
    return {"score": min(found.values()), **found}


@torch.no_grad()
def measure(vae: VideoVAE, pixels: Tensor) -> dict[str, float]:
    """PSNR of clips (B, 3, T, H, W) coded whole; and of the first frame when given as an image."""
    num_frames = pixels.shape[2]
    z = vae.encode(pixels)
    by_frame = pixels.transpose(1, 2)
    whole, on_object = autoencoder.psnr(vae.decode(z, num_frames).transpose(1, 2), by_frame)
    z[:, :, :1] = vae.encode(pixels[:, :, :1])
    first, first_object = autoencoder.psnr(
        vae.decode(z, num_frames).transpose(1, 2)[:, :1], by_frame[:, :1]
    )
    return {"psnr": whole, "object": on_object, "first": first, "first_object": first_object}


def _standing(pictures: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 17, 3, H, W)."""
    return pictures[:, None].expand(-1, PIECE, -1, -1, -1)


def _scaled(vae: VideoVAE, scaling_factor: float) -> VideoVAE:
    again = build(scaling_factor).to(vae.shift.device)
    again.load_state_dict(vae.state_dict())
    return again


def _object_cells(x: Tensor, std: Tensor) -> Tensor:
    """More weight for cells that differ from the corner's, where the background is."""
    away = ((x - x[..., :1, :1]) / std).abs().amax(1, keepdim=True)
    weight: Tensor = 1 + 4 * (away > 0.3)
    return weight.expand_as(x)
