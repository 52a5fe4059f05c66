"""Training latents of the denoiser: clips are rendered and encoded once, and cached on disk.

The autoencoder's own training is in `autoencoder` and `temporal`. Read next: `denoiser`.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyframe.checkpoints.shapes_prompts import Scene
from everyframe.families.opensora.vae import VideoVAE
from recipes.shapes import autoencoder, temporal, world
from recipes.shapes.loop import save
from recipes.shapes.world import LARGE, SMALL, Format

#: Clips that are drawn of each format; most serve backwards as well.
NUM_CACHED = {SMALL: 40_000, LARGE: 12_000}
GROUP = {SMALL: 128, LARGE: 16}  # clips that are encoded at once
# Motions that change few cells, or change them little, are learned last: more clips are drawn of
# them (no turning clip serves backwards), and they fill more of a batch (`denoiser.SHARES`).
DRAWN = {"turning": 4.0, "growing": 1.5, "shrinking": 1.5}
BACKWARDS = {
    "right": "left", "left": "right", "up": "down", "down": "up",
    "growing": "shrinking", "shrinking": "growing",
}  # fmt: skip


@dataclass(frozen=True)
class Latents:
    """Normalised latents of N clips (N, C, T, h, w) and of their first frames encoded as images
    (N, C, 1, h, w), and the scene of each clip."""

    clips: Tensor
    first: Tensor
    scenes: list[Scene]

    def part(self, rows: slice) -> Latents:
        return Latents(self.clips[rows], self.first[rows], self.scenes[rows])


def trained_vae(work: Path, device: str = "cpu") -> VideoVAE:
    """The normalised autoencoder, with the best weights of the last stage that has run."""
    has_polish = (work / "polish" / "best.pt").exists()
    vae = temporal.trained(work, "polish" if has_polish else "temporal", device)
    normalise(vae.eval())
    return vae


def normalise(vae: VideoVAE) -> None:
    """Measure shift and scale of each latent channel on a fixed set of training clips.

    Weights that already contain both, as the shipped ones do, keep them.
    """
    if bool(vae.shift.any()):
        return
    scenes = world.random_scenes(world.train_scenes(), 256, np.random.default_rng(27))
    z = encode(vae, scenes, SMALL, np.random.default_rng(27)).clips * vae.scale + vae.shift
    vae.shift.copy_(z.mean(dim=(0, 2, 3, 4)).view_as(vae.shift))
    vae.scale.copy_(z.std(dim=(0, 2, 3, 4)).view_as(vae.scale))


@torch.no_grad()
def encode(
    vae: VideoVAE, scenes: list[Scene], form: Format, rng: np.random.Generator,
    both_ways: bool = False,
) -> Latents:  # fmt: skip
    """Latents of one clip per scene. With `both_ways` also of clips that are training clips when
    reversed. The spatial stage, which is most of the work, encodes every frame once."""
    frames = world.draw_whole(world.random_clips(scenes, rng), form, vae.shift.device)
    x = temporal.spatial_latents(vae, frames)
    if both_ways:
        more = backwards(scenes)
        x = torch.cat([x, x[[i for i, _ in more]].flip(2)])
        scenes = [*scenes, *(scene for _, scene in more)]
    pieces = x.split(temporal.PIECE, dim=2)
    whole = torch.cat([vae.temporal_vae.encode(piece) for piece in pieces], dim=2)
    parts = whole, vae.temporal_vae.encode(x[:, :, :1])
    z, first = ((part - vae.shift) / vae.scale for part in parts)
    return Latents(z, first, scenes)


@torch.no_grad()
def empty(vae: VideoVAE, form: Format) -> Tensor:
    """Latents (N, C, T, h, w) of each of `autoencoder.GROUNDS` without an object."""
    frames = autoencoder.empty_frames(form.side, vae.shift.device)
    return vae.encode(frames[:, :, None].expand(-1, -1, form.num_frames, -1, -1))


def backwards(scenes: list[Scene]) -> list[tuple[int, Scene]]:
    """Indices of clips that show a training scene when reversed, and those scenes."""
    found = []
    for index, scene in enumerate(scenes):
        if scene.motion in BACKWARDS:
            other = replace(scene, motion=BACKWARDS[scene.motion])
            if not world.held_out(other):
                found.append((index, other))
    return found


def cached_latents(work: Path, vae: VideoVAE, form: Format, count: int | None = None) -> Latents:
    """`count` training clips encoded in both directions, on the autoencoder's device; read from
    the folder if this encoder's are cached there."""
    count = NUM_CACHED[form] if count is None else count
    file = work / f"latents_{form.side}_{count}_{_encoder_digest(vae)}.pt"
    if not file.exists():
        rng, known = np.random.default_rng([21, form.side]), world.train_scenes()
        odds = np.array([DRAWN.get(scene.motion, 1.0) for scene in known])
        chosen = [known[i] for i in rng.choice(len(known), size=count, p=odds / odds.sum())]
        parts: list[Latents] = []
        for start in range(0, count, GROUP[form]):
            part = encode(vae, chosen[start : start + GROUP[form]], form, rng, both_ways=True)
            parts.append(Latents(part.clips.half(), part.first.half(), part.scenes))
            if start % (25 * GROUP[form]) == 0:
                print(f"encoded {start} of {count} clips of {form}", flush=True)
        kept: dict[str, Any] = {
            "clips": torch.cat([part.clips for part in parts]),
            "first": torch.cat([part.first for part in parts]),
            "scenes": [list(astuple(scene)) for part in parts for scene in part.scenes],
        }
        save(kept, file)
    kept = torch.load(file, weights_only=True, map_location=vae.shift.device)
    return Latents(kept["clips"], kept["first"], [Scene(*words) for words in kept["scenes"]])


def _encoder_digest(vae: VideoVAE) -> str:
    """Digest of the weights that decide what a clip's latents are: all but the decoders'."""
    digest = hashlib.sha256(str(vae.config.spatial.scaling_factor).encode())
    for name, value in sorted(vae.state_dict().items()):
        if "decoder" not in name and "post_quant_conv" not in name:
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
