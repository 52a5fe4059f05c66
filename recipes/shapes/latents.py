"""The clips that the denoiser is trained on: drawn and encoded once, kept in the folder of runs.

Not here: the autoencoder's own training (`autoencoder`, `temporal`, `polish`).
Read next: `denoiser`.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import Scene
from everyframe.families.opensora.vae import VideoVAE
from recipes.shapes import autoencoder, temporal, world
from recipes.shapes.loop import load_best

NUM_CACHED = 10000  # clips that are drawn; most serve backwards as well
GROUP = 64  # clips that are encoded at once
# Motions that change few cells, or change them little, are learned last: more clips are drawn of
# them (no turning clip serves backwards), and they fill more of a batch (`Draws`).
DRAWN = {"turning": 4.0, "growing": 1.5, "shrinking": 1.5}
BACKWARDS = {
    "right": "left", "left": "right", "up": "down", "down": "up",
    "growing": "shrinking", "shrinking": "growing",
}  # fmt: skip


@dataclass(frozen=True)
class Latents:
    """Normalised latents of N clips (N, C, 5, h, w), of their first frames encoded as images
    (N, C, 1, h, w), and which scene each clip is of."""

    clips: Tensor
    first: Tensor
    scenes: list[Scene]


def trained_vae(work: Path, polished: bool = True) -> VideoVAE:
    """The autoencoder with its best weights: of stage 5 if that has run, else of stage 2."""
    kept = json.loads((work / "temporal" / "scaling.json").read_text())
    vae = temporal.build(kept["scaling_factor"])
    has_polish = polished and (work / "polish" / "best.pt").exists()
    load_best(nn.ModuleDict({"vae": vae}), work / ("polish" if has_polish else "temporal"))
    return vae.eval()


def normalise(vae: VideoVAE) -> None:
    """Measures shift and scale of each latent channel on training clips, the same ones always.

    Weights that come with both, as the shipped ones do, keep them.
    """
    if bool(vae.shift.any()):
        return
    clips = world.random_clips(world.train_scenes(), 256, np.random.default_rng(27))
    z = encode(vae, clips).clips * vae.scale + vae.shift
    vae.shift.copy_(z.mean(dim=(0, 2, 3, 4)).view_as(vae.shift))
    vae.scale.copy_(z.std(dim=(0, 2, 3, 4)).view_as(vae.scale))


@torch.no_grad()
def encode(vae: VideoVAE, clips: list[world.Clip], both_ways: bool = False) -> Latents:
    """Clips as latents; with `both_ways` also those that are training clips when run backwards.

    The spatial stage, which is most of the work, sees every frame once.
    """
    x = temporal.spatial_latents(vae, clips).float() * vae.config.spatial.scaling_factor
    scenes = [clip.scene for clip in clips]
    if both_ways:
        more = backwards(scenes)
        x = torch.cat([x, x[[i for i, _ in more]].flip(2)])
        scenes += [scene for _, scene in more]
    parts = [vae.temporal_vae.encode(part) for part in (x, x[:, :, :1])]
    z, first = ((part - vae.shift) / vae.scale for part in parts)
    return Latents(z, first, scenes)


@torch.no_grad()
def grounds(vae: VideoVAE) -> dict[str, Tensor]:
    """Each background's latents (C, 5, h, w) without an object."""
    names, empty = autoencoder.empty_frames()
    clips = empty[:, :, None].expand(-1, -1, world.NUM_FRAMES, -1, -1)
    return dict(zip(names, vae.encode(clips), strict=True))


def backwards(scenes: list[Scene]) -> list[tuple[int, Scene]]:
    """Which of the clips show a training scene when they run backwards, and which one."""
    found = []
    for index, scene in enumerate(scenes):
        if scene.motion in BACKWARDS:
            other = replace(scene, motion=BACKWARDS[scene.motion])
            if not world.held_out(other):
                found.append((index, other))
    return found


def drawn_clips(count: int) -> tuple[list[world.Clip], Any]:
    """The clips that `cached_latents` draws, and the row of each in it (the rest run backwards)."""
    rng, known = np.random.default_rng(21), world.train_scenes()
    odds = np.array([DRAWN.get(scene.motion, 1.0) for scene in known])
    chosen = rng.choice(len(known), size=count, p=odds / odds.sum())
    clips = [world.random_clip(known[i], rng) for i in chosen]
    rows: list[int] = []
    offset = 0
    for start in range(0, count, GROUP):
        scenes = [clip.scene for clip in clips[start : start + GROUP]]
        rows += range(offset, offset + len(scenes))
        offset += len(scenes) + len(backwards(scenes))
    return clips, np.array(rows)


def cached_latents(work: Path, vae: VideoVAE, count: int) -> Latents:
    """`count` training clips encoded both ways; from the folder, if they lie there."""
    file = work / "latents.pt"
    if not file.exists():
        clips, _ = drawn_clips(count)
        parts: list[Latents] = []
        for start in range(0, count, GROUP):
            parts.append(encode(vae, clips[start : start + GROUP], both_ways=True))
            if start % 1600 == 0:
                print(f"encoded {start} of {count} clips", flush=True)
        kept = {
            "clips": torch.cat([part.clips.half() for part in parts]),
            "first": torch.cat([part.first.half() for part in parts]),
            "scenes": [list(astuple(scene)) for part in parts for scene in part.scenes],
        }
        torch.save(kept, file)
    kept = torch.load(file, weights_only=True)
    return Latents(kept["clips"], kept["first"], [Scene(*words) for words in kept["scenes"]])


def split(latents: Latents, num_held: int = 96) -> tuple[Latents, Latents]:
    """All but the last clips to train on, and those to validate with."""
    return (
        Latents(latents.clips[:-num_held], latents.first[:-num_held], latents.scenes[:-num_held]),
        Latents(latents.clips[-num_held:], latents.first[-num_held:], latents.scenes[-num_held:]),
    )
