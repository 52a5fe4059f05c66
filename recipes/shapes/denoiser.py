"""Stage 4: the denoiser (`STDiT3`) and its text encoder, trained together on cached latents.

Rectified flow as the product samples it: ``x_t = (1 - s) x0 + s noise``, the model answers
``x0 - noise``. A tenth of the texts is replaced by the learned null text, for guidance; in a
quarter of the clips some latent frames are given (not noised, timestep 0, no loss on them), most
often the first, encoded alone as an image is at inference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from recipes.shapes.latents import (
    BACKWARDS,
    NUM_CACHED,
    Latents,
    cached_latents,
    grounds,
    normalise,
    split,
    trained_vae,
)
from recipes.shapes.loop import Task, autocast, load_best, num_ranks, rank

SIZES = STDiT3Config(
    in_channels=temporal.CHANNELS,
    hidden_size=192,
    depth=4,
    num_heads=6,
    caption_channels=text.T5_SIZES["d_model"],
    model_max_length=text.MAX_LENGTH,
)
OBJECT_WEIGHT = 3.0
CHANGE_WEIGHT = 4.0  # of cells that change in time: they alone show a growing or turning object
# Sampling, in training's checks and as the shipped folder's own defaults.
SHIFT = 4.0  # of the timesteps towards high noise
NUM_STEPS = 30
GUIDANCE = 1.2
NULL_TEXT = 0.1
# Which latent frames are given, and how often: (first, last, weight).
GIVEN = ((1, 0, 0.17), (0, 1, 0.02), (1, 1, 0.02), (2, 0, 0.02), (3, 0, 0.01))


@dataclass(frozen=True)
class Draws:
    """What a batch is made of: the share of each motion, the motions of which only the beginning
    of sampling is trained, where it is decided what a clip shows, and those in which a teacher
    is followed that has them right already: its answers have no noise of their own."""

    shares: dict[str, float]
    early: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


ALL = Draws({
    "right": 0.1, "left": 0.1, "up": 0.1, "down": 0.1, "still": 0.06,
    "growing": 0.12, "shrinking": 0.12, "turning": 0.3,
})  # fmt: skip
EARLY = (0.86, 0.999)  # noise levels


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


@dataclass(frozen=True)
class Noised:
    """A batch as the denoiser gets it: x0 and noise (B, C, 5, h, w), which latent frames are to be
    denoised (B, 5), and each clip's noise level (B,)."""

    x0: Tensor
    noise: Tensor
    mask: Tensor
    s: Tensor


def noised(latents: Latents, rows: Any, rng: np.random.Generator, early: Tensor) -> Noised:
    """Clips of `rows` with noise and given frames drawn; (B,) `early` ones only at high noise."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    index = torch.as_tensor(rows)
    x0 = latents.clips[index].float()
    mask = given_frames(len(rows), rng) | early[:, None]
    # Two or more given frames are a clip to go on from; one is an image.
    alone = ~mask[:, 0] & mask[:, 1]
    x0[alone, :, :1] = latents.first[index[alone]].float()
    noise = torch.randn(x0.shape, generator=generator)
    # Latents repeat themselves, so what a clip shows is decided at high noise: drawn more often.
    s = torch.sigmoid(torch.randn(len(rows), generator=generator) * 1.2 + 1.6)
    evenly = torch.rand(len(rows), generator=generator)
    some = torch.rand(len(rows), generator=generator) < 0.2
    s = torch.where(some, evenly, s)
    return Noised(x0, noise, mask, torch.where(early, EARLY[0] + (EARLY[1] - EARLY[0]) * evenly, s))


def batch_loss(
    modules: Any, latents: Latents, rows: Any, words: text.Captions, seed: list[int],
    empty: dict[str, Tensor] | None = None, draws: Draws = ALL, teacher: Any = None,
) -> Tensor:  # fmt: skip
    """Mean squared error of the velocity over frames that are not given.

    In training, which is where `empty` (of `grounds`) is given, some texts are left out, and cells
    that the object is in or that change weigh more: they are few, and geometry is learned last.
    """
    rng = np.random.default_rng(seed)
    scenes = [latents.scenes[i] for i in rows]
    early = torch.tensor([scene.motion in draws.early for scene in scenes])
    drawn = noised(latents, rows, rng, early)
    x0, mask = drawn.x0, drawn.mask
    level = drawn.s[:, None, None, None, None] * mask[:, None, :, None, None]
    ids, text_mask = words(scenes, rng)
    drop = torch.from_numpy(rng.random(len(rows)) < (NULL_TEXT if empty is not None else 0.0))
    x_t = (1 - level) * x0 + level * drawn.noise
    target = x0 - drawn.noise
    # With so few tokens the plain formula's backward is 1.6 times as fast a step as flash's.
    with autocast(), sdpa_kernel(SDPBackend.MATH):
        kept = torch.tensor([scene.motion in draws.kept for scene in scenes]).nonzero()[:, 0]
        if len(kept):
            # Asked in the plainest words: some wordings it may not understand.
            said = [captions.plain_caption(scenes[i]) for i in kept.tolist()]
            asked = *text.tokenize(said, words.tokenizer), drop[kept], mask[kept]
            with torch.no_grad():
                target[kept] = answer(teacher, x_t[kept], drawn.s[kept], *asked)
        out = answer(modules, x_t, drawn.s, ids, text_mask, drop, mask)
    error = (out - target).square()
    weight = mask[:, None, :, None, None].expand_as(error)
    if empty is not None:
        ground = torch.stack([empty[scene.background] for scene in scenes])
        away = (x0 - ground).abs().amax(1, keepdim=True)
        # The first latent frame is of another kind than those that stand for four frames.
        change = (x0[:, :, 1:] - x0[:, :, 1:].mean(2, keepdim=True)).abs().amax((1, 2))
        weight = weight * (
            1 + OBJECT_WEIGHT * (away > 0.9) + CHANGE_WEIGHT * (change > 0.5)[:, None, None]
        )
    mean: Tensor = (error * weight).sum() / weight.sum()
    return mean


def answer(
    modules: Any, x_t: Tensor, s: Tensor, ids: Tensor, text_mask: Tensor,
    drop: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The velocity (B, C, 5, h, w) that the denoiser sees in `x_t` at noise levels `s`, float32."""
    out = modules["denoiser"](
        x_t, s * 1000, contexts(modules, ids, text_mask, drop),
        fps=float(world.FPS), height=64.0, width=64.0, x_mask=mask,
    )  # fmt: skip
    return out[:, : temporal.CHANNELS].float()


def tells_direction(modules: Any, latents: Latents, rows: list[int], level: float = 0.9) -> float:
    """How often a clip's own caption explains it better than the caption of its reversal.

    Half is chance: then the text does not say which way a clip of such a motion goes.
    """
    x0 = latents.clips[rows].float()
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(28))
    scenes = [latents.scenes[i] for i in rows]
    levels, errors = torch.full((len(rows),), level), []
    for said in (scenes, [replace(one, motion=BACKWARDS[one.motion]) for one in scenes]):
        ids, mask = text.tokenize([captions.plain_caption(s) for s in said], text.tokenizer())
        out = answer(modules, (1 - level) * x0 + level * noise, levels, ids, mask)
        errors.append((out - (x0 - noise)).square().mean(dim=(1, 2, 3, 4)))
    return float((errors[0] < errors[1]).float().mean())


def before(work: Path) -> nn.ModuleDict:
    """What training starts from: this stage's own weights, or new ones and `text`'s."""
    if (work / "denoiser" / "best.pt").exists():
        return trained_in(work / "denoiser")
    modules = build()
    take_text(modules, work / "text")
    return modules


def trained_in(folder: Path) -> nn.ModuleDict:
    """Denoiser and text encoder with the best weights of a stage that trains both."""
    modules = build()
    load_best(modules, folder)
    return modules


def take_text(modules: Any, folder: Path) -> None:
    """The text encoder of a stage that trained it alone."""
    taught = understand.build()
    load_best(taught, folder)
    modules["text"].load_state_dict(taught["text"].state_dict())


def task(
    work: Path, num_steps: int = 4000, batch: int = 96, draws: Draws = ALL,
    modules: Any = None, teacher: Any = None,
) -> Task:  # fmt: skip
    """The stage for `loop.train`; encodes its clips first, with the autoencoder in `work`."""
    vae = trained_vae(work)
    normalise(vae)
    latents, held = split(cached_latents(work, vae, NUM_CACHED))
    empty = grounds(vae)
    motions = [scene.motion for scene in latents.scenes]
    odds = np.array([draws.shares[motion] / motions.count(motion) for motion in motions])
    modules = before(work) if modules is None else modules
    words = text.Captions()
    trials = list(world.held_out_scenes())[::16] + list(world.train_scenes())[::144]

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        own = [step, rank()]
        share = batch // num_ranks()
        rows = np.random.default_rng([23, *own]).choice(len(odds), size=share, p=odds)
        return batch_loss(modules, latents, rows, words, [24, *own], empty, draws, teacher), {}

    there_and_back = [i for i, scene in enumerate(held.scenes) if scene.motion in BACKWARDS]

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        losses = [
            batch_loss(modules, held, np.arange(i, i + 32), words, [25, i]).item()
            for i in range(0, len(held.scenes), 32)
        ]
        right = read_back(sample(modules, vae, trials, seed=26), trials)
        told = tells_direction(modules, held, there_and_back)
        return {"score": -float(np.mean(losses)), "told": told, **right}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        weight_decay=0.01, warmup=min(200, num_steps // 10), ema=1 - 8 / num_steps,
        validate_every=min(250, num_steps // 4),
        muon=("denoiser.spatial_blocks", "denoiser.temporal_blocks"),
        compilable=tuple(modules["denoiser"].blocks_in_order()),
    )  # fmt: skip


@torch.no_grad()
def sample(
    modules: Any, vae: VideoVAE, scenes: list[Scene], *, seed: int, first: Tensor | None = None
) -> world.Floats:
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
    levels = (rflow.schedule(NUM_STEPS, shift=SHIFT)[:, 0] / rflow.NUM_TIMESTEPS).tolist()
    for s, following in pairwise(levels):
        out = modules["denoiser"](
            torch.cat([x, x]), torch.full((2 * len(x),), 1000 * s), context,
            fps=float(world.FPS), height=64.0, width=64.0, x_mask=torch.cat([x_mask, x_mask]),
        )[:, : temporal.CHANNELS].float()  # fmt: skip
        with_text, without = out.chunk(2)
        velocity = without + GUIDANCE * (with_text - without)
        x = x + velocity * (s - following) * x_mask[:, None, :, None, None]
    frames = [vae.decode(part, world.NUM_FRAMES) for part in torch.split(x, 8)]
    pixels = torch.cat(frames).clamp(-1, 1).permute(0, 2, 3, 4, 1) / 2 + 0.5
    return pixels.contiguous().numpy()


def read_back(frames: world.Floats, scenes: list[Scene]) -> dict[str, float]:
    """How often each attribute, and all of them, is read as it was asked for."""
    read = [reader.read(clip).right(scene) for clip, scene in zip(frames, scenes, strict=True)]
    shares = {name: float(np.mean([row[name] for row in read])) for name in read[0]}
    return {**shares, "all": float(np.mean([all(row.values()) for row in read]))}
