"""Stage 5: both decoders of the autoencoder trained on, the encoders left as they are.

Latents stay what the denoiser was trained on, so this can be done after it, or beside it. Pieces of
clips are encoded once; some frames of each are decoded and compared with what was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.families.opensora.vae import VideoVAE
from recipes.shapes import autoencoder, temporal, world
from recipes.shapes.loop import Task, autocast
from recipes.shapes.world import FORMATS, LARGE, SMALL, Format

NUM_CODED = {SMALL: 2000, LARGE: 800}
GROUP = 16  # pieces that are encoded at once
NUM_DECODED = 4  # frames of each piece that are decoded to pixels


@dataclass(frozen=True)
class Coded:
    """Pieces of clips, when their frames are (N, 17), their latents (N, C, 5, h, w), and those of
    their first frames encoded as images (N, C, 1, h, w); neither is normalised."""

    clips: world.Clips
    times: Tensor
    z: Tensor
    alone: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, vae: VideoVAE, form: Format) -> Coded:
        rng = np.random.default_rng([41, form.side])
        scenes = world.random_scenes(world.train_scenes(), NUM_CODED[form], rng)
        clips, times = temporal.random_pieces(scenes, form, rng)
        latents, alone = [], []
        for start in range(0, len(clips), GROUP):
            rows = range(start, min(start + GROUP, len(clips)))
            when = times[rows.start : rows.stop]
            frames = world.draw(clips.rows(rows), form.side, when, vae.shift.device)
            x = temporal.spatial_latents(vae, frames)
            latents.append(vae.temporal_vae.encode(x))
            alone.append(vae.temporal_vae.encode(x[:, :, :1]))
        return cls(clips, times, torch.cat(latents), torch.cat(alone))


def task(work: Path, num_steps: int = 4000, batch: int = 32, device: str = "cpu") -> Task:
    """The stage for `loop.train`; starts from the best of stage 2.

    `batch` small pieces a step, and a quarter as many large ones.
    """
    vae = temporal.trained(work, "temporal", device)
    spatial, inner = vae.spatial_vae.module, vae.temporal_vae
    vae.requires_grad_(False)
    for decoder in (spatial.decoder, spatial.post_quant_conv, inner.decoder, inner.post_quant_conv):
        decoder.requires_grad_(True)
    factor, counts = vae.config.spatial.scaling_factor, (batch, batch // 4)
    coded = {form: Coded.of(vae, form) for form in FORMATS}
    held = {form: temporal.held_clips(form, device) for form in FORMATS}

    def draw(step: int) -> tuple[Tensor, ...]:
        rng, drawn = np.random.default_rng([42, step]), []
        for form, count in zip(FORMATS, counts, strict=True):
            known, rows = coded[form], rng.integers(NUM_CODED[form], size=count)
            frames = rng.permuted(np.tile(np.arange(temporal.PIECE), (count, 1)), axis=1)
            chosen = torch.from_numpy(frames[:, :NUM_DECODED])
            index = world.sent(torch.from_numpy(rows), device)
            z = known.z[index]
            z[: count // 2, :, :1] = known.alone[index[: count // 2]]
            when = known.times[torch.from_numpy(rows)].gather(1, chosen)
            target = world.draw(known.clips.rows(rows.tolist()), form.side, when, device)
            drawn += [z, target, world.sent(chosen, device)]
        return tuple(drawn)

    def loss(*drawn: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        shown: dict[str, Tensor] = {}
        for i, form in enumerate(FORMATS):
            z, target, chosen = drawn[3 * i : 3 * i + 3]
            with autocast(device):
                out = inner.decode(z + temporal.NOISE * torch.randn_like(z), temporal.PIECE)
                rows = torch.arange(len(z), device=device)[:, None]
                picked = out.transpose(1, 2)[rows, chosen].flatten(0, 1)
                pixels = spatial.decode(picked / factor).sample
            error = autoencoder.pixel_loss(pixels.float(), target.flatten(0, 1))
            shown[f"pixel_{form.side}"] = error
        return torch.stack(list(shown.values())).mean(), shown

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        return temporal.measured(vae, held)

    return Task(
        nn.ModuleDict({"vae": vae}), draw, loss, validate, clips_per_step=sum(counts),
        num_steps=num_steps, learning_rate=3e-4, static=True,
    )  # fmt: skip
