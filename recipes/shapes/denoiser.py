"""Stage 4: the denoiser (`STDiT3`) and its text encoder, trained together on cached latents.

Rectified flow as the product samples it: ``x_t = (1 - s) x0 + s noise``, the model answers
``x0 - noise``. A tenth of the texts is replaced by the learned null text, for guidance; in a
quarter of the clips some latent frames are given (not noised, timestep 0, no loss on them), most
often the first, encoded alone as an image is at inference.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from everyframe.checkpoints.shapes_prompts import Scene
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora.vae import VideoVAE
from everyframe.samplers import rflow
from recipes.shapes import captions, reader, temporal, text, understand, world
from recipes.shapes.loop import Task, load_best, num_ranks, rank

SIZES = STDiT3Config(
    in_channels=temporal.CHANNELS,
    hidden_size=192,
    depth=4,
    num_heads=6,
    caption_channels=text.T5_SIZES["d_model"],
    model_max_length=text.MAX_LENGTH,
)
NUM_CACHED = 10000  # clips that are drawn; most serve backwards as well
OBJECT_WEIGHT = 3.0
SHIFT = 4.0  # of the timesteps towards high noise, when sampling
# Motions that change few cells, or change them little, are learned last: drawn more often.
DRAWN = {"turning": 3.0, "growing": 1.5, "shrinking": 1.5}
GROUP = 64  # clips that are encoded at once
NULL_TEXT = 0.1
# Which latent frames are given, and how often: (first, last, weight).
GIVEN = ((1, 0, 0.17), (0, 1, 0.02), (1, 1, 0.02), (2, 0, 0.02), (3, 0, 0.01))
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

    @cached_property
    def grounds(self) -> dict[str, Tensor]:
        """Each background's latents (C, 5, h, w) without an object: the median of many clips."""
        names = [scene.background for scene in self.scenes[:2000]]
        return {
            name: self.clips[[i for i, own in enumerate(names) if own == name]]
            .float()
            .median(dim=0)
            .values
            for name in sorted(set(names))
        }


def trained_vae(work: Path, polished: bool = True) -> VideoVAE:
    """The autoencoder with its best weights: of stage 5 if that has run, else of stage 2."""
    kept = json.loads((work / "temporal" / "scaling.json").read_text())
    vae = temporal.build(kept["scaling_factor"])
    has_polish = polished and (work / "polish" / "best.pt").exists()
    load_best(nn.ModuleDict({"vae": vae}), work / ("polish" if has_polish else "temporal"))
    return vae.eval()


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
    clips = world.random_clips(world.train_scenes(), count, np.random.default_rng(21))
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


def build() -> nn.ModuleDict:
    denoiser = STDiT3(SIZES)
    denoiser.initialise()
    return nn.ModuleDict({"denoiser": denoiser, "text": text.encoder()})


def contexts(modules: Any, ids: Tensor, mask: Tensor, drop: Tensor | None = None) -> Any:
    """The denoiser's text context of tokenized texts; rows in `drop` get the null text."""
    hidden = modules["text"](input_ids=ids, attention_mask=mask.long()).last_hidden_state
    if drop is not None:
        null = modules["denoiser"].null_text()[: ids.shape[1]].to(hidden.dtype)
        hidden = torch.where(drop[:, None, None], null[None], hidden)
    return modules["denoiser"].context(hidden, mask)


def given_frames(count: int, rng: np.random.Generator) -> Tensor:
    """(count, 5) True where a latent frame is to be denoised, by the odds of `GIVEN`."""
    mask = torch.ones(count, 5, dtype=torch.bool)
    odds = [weight for *_, weight in GIVEN]
    for row, draw in enumerate(rng.random(count)):
        for (first, last, _), reached in zip(GIVEN, np.cumsum(odds), strict=True):
            if draw < reached:
                mask[row, :first] = False
                if last:
                    mask[row, -last:] = False
                break
    return mask


def batch_loss(
    modules: Any, latents: Latents, rows: Any, words: text.Captions, seed: list[int], train: bool
) -> Tensor:
    """Mean squared error of the velocity over frames that are not given.

    In training, cells that the object is in weigh more: they are few, and geometry is learned last.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    index = torch.as_tensor(rows)
    x0 = latents.clips[index].float()
    mask = given_frames(len(rows), rng)
    # Two or more given frames are a clip to go on from; one is an image.
    alone = ~mask[:, 0] & mask[:, 1]
    x0[alone, :, :1] = latents.first[index[alone]].float()
    noise = torch.randn(x0.shape, generator=generator)
    # Latents repeat themselves, so what a clip shows is decided at high noise: drawn more often.
    s = torch.sigmoid(torch.randn(len(rows), generator=generator) * 1.2 + 1.6)
    some = torch.rand(len(rows), generator=generator) < 0.2
    s = torch.where(some, torch.rand(len(rows), generator=generator), s)
    level = s[:, None, None, None, None] * mask[:, None, :, None, None]
    ids, text_mask = words([latents.scenes[i] for i in rows], rng)
    drop = torch.rand(len(rows), generator=generator) < (NULL_TEXT if train else 0.0)
    # With so few tokens the plain formula's backward is 1.6 times as fast a step as flash's.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        context = contexts(modules, ids, text_mask, drop)
        out = modules["denoiser"](
            (1 - level) * x0 + level * noise, s * 1000, context,
            fps=float(world.FPS), height=64.0, width=64.0, x_mask=mask,
        )  # fmt: skip
    error = (out[:, : temporal.CHANNELS].float() - (x0 - noise)).square()
    weight = mask[:, None, :, None, None].expand_as(error)
    if train:
        grounds = torch.stack([latents.grounds[latents.scenes[i].background] for i in rows])
        away = (x0 - grounds).abs().amax(1, keepdim=True)
        weight = weight * (1 + OBJECT_WEIGHT * (away > 0.9))
    mean: Tensor = (error * weight).sum() / weight.sum()
    return mean


def task(work: Path, num_steps: int = 4000, batch: int = 96) -> Task:
    """The stage for `loop.train`; encodes its clips first, with the autoencoder in `work`."""
    vae = trained_vae(work)
    normalise(vae)
    latents = cached_latents(work, vae, NUM_CACHED)
    held_clips = world.random_clips(world.train_scenes(), 256, np.random.default_rng(22))
    held = encode(vae, held_clips)
    odds = np.array([DRAWN.get(scene.motion, 1.0) for scene in latents.scenes])
    odds /= odds.sum()
    modules, words = build(), text.Captions()
    taught = understand.build()
    load_best(taught, work / "text")
    modules["text"].load_state_dict(taught["text"].state_dict())
    trials = list(world.held_out_scenes())[::8] + list(world.train_scenes())[::72]

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        own = [step, rank()]
        share = batch // num_ranks()
        rows = np.random.default_rng([23, *own]).choice(len(odds), size=share, p=odds)
        return batch_loss(modules, latents, rows, words, [24, *own], True), {}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        losses = [
            batch_loss(modules, held, np.arange(i, i + 32), words, [25, i], False).item()
            for i in range(0, 256, 32)
        ]
        right = read_back(sample(modules, vae, trials, guidance=1.5, num_steps=24, seed=26), trials)
        return {"score": -float(np.mean(losses)), **right}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        weight_decay=0.01, warmup=200, ema=0.998, validate_every=250,
        muon=("denoiser.spatial_blocks", "denoiser.temporal_blocks"),
        compilable=tuple(modules["denoiser"].blocks_in_order()),
    )  # fmt: skip


def normalise(vae: VideoVAE) -> None:
    """Measures shift and scale of each latent channel on training clips, the same ones always."""
    clips = world.random_clips(world.train_scenes(), 256, np.random.default_rng(27))
    z = encode(vae, clips).clips * vae.scale + vae.shift
    vae.shift.copy_(z.mean(dim=(0, 2, 3, 4)).view_as(vae.shift))
    vae.scale.copy_(z.std(dim=(0, 2, 3, 4)).view_as(vae.scale))


@torch.no_grad()
def sample(
    modules: Any, vae: VideoVAE, scenes: list[Scene], *, guidance: float, num_steps: int,
    seed: int, first: Tensor | None = None,
) -> world.Floats:  # fmt: skip
    """Clips (B, T, H, W, 3) of plain captions by Euler steps: a check in training only.

    The product's own sampler makes the clips that are evaluated in the end. `first` are latents of
    given first frames (B, C, 1, h, w).
    """
    generator = torch.Generator().manual_seed(seed)
    ids, mask = text.tokenize([captions.plain_caption(s) for s in scenes], text.tokenizer())
    both = torch.cat([ids, ids]), torch.cat([mask, mask])
    drop = torch.arange(2 * len(scenes)) >= len(scenes)
    context = contexts(modules, *both, drop)
    x = torch.randn(len(scenes), temporal.CHANNELS, 5, 8, 8, generator=generator)
    x_mask = torch.ones(len(scenes), 5, dtype=torch.bool)
    if first is not None:
        x[:, :, :1], x_mask[:, 0] = first, False
    levels = (rflow.schedule(num_steps, shift=SHIFT)[:, 0] / rflow.NUM_TIMESTEPS).tolist()
    for s, following in pairwise(levels):
        out = modules["denoiser"](
            torch.cat([x, x]), torch.full((2 * len(x),), 1000 * s), context,
            fps=float(world.FPS), height=64.0, width=64.0, x_mask=torch.cat([x_mask, x_mask]),
        )[:, : temporal.CHANNELS].float()  # fmt: skip
        with_text, without = out.chunk(2)
        velocity = without + guidance * (with_text - without)
        x = x + velocity * (s - following) * x_mask[:, None, :, None, None]
    frames = [vae.decode(part, world.NUM_FRAMES) for part in torch.split(x, 8)]
    pixels = torch.cat(frames).clamp(-1, 1).permute(0, 2, 3, 4, 1) / 2 + 0.5
    return pixels.contiguous().numpy()


def read_back(frames: world.Floats, scenes: list[Scene]) -> dict[str, float]:
    """How often each attribute, and all of them, is read as it was asked for."""
    read = [reader.read(clip).right(scene) for clip, scene in zip(frames, scenes, strict=True)]
    shares = {name: float(np.mean([row[name] for row in read])) for name in read[0]}
    return {**shares, "all": float(np.mean([all(row.values()) for row in read]))}
