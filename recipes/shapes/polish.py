"""Stage 5: further training of the spatial decoder, with everything before it frozen.

Latents do not change, so this stage can run after the denoiser's training or beside it. The
temporal stage is frozen as well: its outputs for pieces of clips are computed once. A step then
decodes a few dozen frames with one small decoder, which a CPU can do as well.
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

NUM_CODED = {SMALL: 1600, LARGE: 400}
NUM_HELD = 24
GROUP = 16  # pieces that are coded at once
STARS = 2  # of a star's outline there is as much as of all others', so that more are drawn
SQUARE_WEIGHT = 17.0  # of errors squared beside their size: the bar is on squares


@dataclass(frozen=True)
class Coded:
    """Pieces of clips: the times (N, 17) of their frames, and the temporal stage's outputs
    (N, C, 17, h, w), which are the spatial decoder's inputs."""

    clips: world.Clips
    times: Tensor
    latents: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, vae: VideoVAE, form: Format, count: int, seed: int) -> Coded:
        """Encode pieces; in every second one the first frame alone, like a given picture."""
        rng, inner = np.random.default_rng([seed, form.side]), vae.temporal_vae
        known = [s for s in world.train_scenes() for _ in range(STARS if s.shape == "star" else 1)]
        clips, times = temporal.random_pieces(world.random_scenes(known, count, rng), form, rng)
        noise = torch.Generator(vae.shift.device).manual_seed(seed)
        latents = []
        for start in range(0, count, GROUP):
            rows = range(start, min(start + GROUP, count))
            frames = world.draw(
                clips.rows(rows), form.side, times[rows.start : rows.stop], vae.shift.device
            )
            x = temporal.spatial_latents(vae, frames)
            z = inner.encode(x)
            z[::2, :, :1] = inner.encode(x[::2, :, :1])
            z += temporal.NOISE * torch.randn(z.shape, generator=noise, device=z.device)
            out = inner.decode(z, temporal.PIECE)
            latents.append(out / vae.config.spatial.scaling_factor)
        return cls(clips, times, torch.cat(latents))

    def frames(self, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Frame `index` (B,) of each of the pieces `rows` (B,): latents (B, C, h, w) and pixels."""
        device = self.latents.device
        z = self.latents[world.sent(rows, device), :, world.sent(index, device)]
        side = autoencoder.CELL * z.shape[-1]
        when = self.times[rows, index][:, None]
        return z, world.draw(self.clips.rows(rows.tolist()), side, when, device)[:, 0]


def task(work: Path, num_steps: int = 4000, batch: int = 56, device: str = "cpu") -> Task:
    """The stage for `loop.train`; starts from the best of stage 2.

    `batch` small frames a step, and a sixteenth as many large ones: they are far above their bar.
    """
    vae = temporal.trained(work, "temporal", device)
    spatial = vae.spatial_vae.module
    vae.requires_grad_(False)
    for part in (spatial.decoder, spatial.post_quant_conv):
        part.requires_grad_(True)
    counts = world.batch_sizes(batch, 16)
    coded = {form: Coded.of(vae, form, NUM_CODED[form], seed=45) for form in FORMATS}
    held = {form: Coded.of(vae, form, NUM_HELD, seed=43) for form in FORMATS}

    def draw(step: int) -> tuple[Tensor, ...]:
        rng, drawn = np.random.default_rng([42, step]), list[Tensor]()
        for form, count in zip(FORMATS, counts, strict=True):
            rows, index = (
                torch.from_numpy(rng.integers(end, size=count))
                for end in (NUM_CODED[form], temporal.PIECE)
            )
            drawn += coded[form].frames(rows, index)
        return tuple(drawn)

    def loss(*drawn: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        shown: dict[str, Tensor] = {}
        for form, z, target in zip(FORMATS, drawn[::2], drawn[1::2], strict=True):
            with autocast(device):
                pixels = spatial.decode(z).sample
            shown[f"pixel_{form.side}"] = autoencoder.pixel_loss(
                pixels.float(), target, SQUARE_WEIGHT
            )
        return torch.stack(list(shown.values())).mean(), shown

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        found: dict[str, float] = {}
        for form, known in held.items():
            rows = torch.arange(NUM_HELD)
            frames = [known.frames(rows, torch.full_like(rows, t)) for t in range(temporal.PIECE)]
            out = torch.cat([spatial.decode(z).sample for z, _ in frames])
            whole, on_object = autoencoder.psnr(out, torch.cat([pixels for _, pixels in frames]))
            found |= {f"psnr_{form.side}": whole, f"object_{form.side}": on_object}
        return {"score": found["object_64"] + found["object_128"], **found}

    decoder = "vae.spatial_vae.module.decoder"
    return Task(
        nn.ModuleDict({"vae": vae}), draw, loss, validate, clips_per_step=sum(counts),
        num_steps=num_steps, learning_rate=1e-3, static=True,
        muon=(f"{decoder}.mid_block", f"{decoder}.up_blocks"),
    )  # fmt: skip
