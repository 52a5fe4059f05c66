"""Stage 4: the denoiser (`STDiT3`), trained on cached latents with the text encoder of stage 3.

The objective is rectified flow: ``x_t = (1 - s) x0 + s noise``, and the model predicts
``x0 - noise``. A tenth of the texts is replaced by the learned null text, for guidance. In a
quarter of the clips some latent frames are given (no noise, timestep 0, no loss), most often the
first one, encoded alone like an image at inference. Each step trains on clips of both formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import Scene
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora.vae import VideoVAE
from everyframe.ops.text_context import TextContext
from everyframe.samplers import rectified_flow
from recipes.shapes import captions, latents, reader, temporal, text, world
from recipes.shapes.autoencoder import grounds_of
from recipes.shapes.initialise import initialise
from recipes.shapes.latents import Latents, cached_latents, trained_vae
from recipes.shapes.loop import Task, autocast, load_best
from recipes.shapes.world import FORMATS, LARGE, SMALL, Format

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
SHIFT = 14.0  # of the timesteps towards high noise, beside Open-Sora's own for a video's size
NUM_STEPS = 30
GUIDANCE = 1.2
NULL_TEXT = 0.1
NUM_HELD = 96  # clips of each format that are kept from training
# Latents repeat themselves, so what a clip shows is decided at high noise, and the higher the more
# of them there are: the mean of the noise levels' logits, for one frame of 512 x 512.
NOISE_MEAN = 2.9
#: How often each motion is in a batch.
SHARES = {
    "right": 0.12, "left": 0.12, "up": 0.12, "down": 0.12, "still": 0.1,
    "growing": 0.1, "shrinking": 0.1, "turning": 0.22,
}  # fmt: skip
# Which latent frames are given, and how often: (first, last, weight).
GIVEN = {
    SMALL: ((1, 0, 0.17), (0, 1, 0.02), (1, 1, 0.02), (2, 0, 0.02), (3, 0, 0.01)),
    LARGE: ((1, 0, 0.17), (0, 1, 0.02), (1, 1, 0.02), (2, 0, 0.01), (5, 0, 0.02)),
}


def build() -> nn.ModuleDict:
    """Denoiser and text encoder; only the denoiser is trained."""
    denoiser = STDiT3(SIZES)
    initialise(denoiser)
    modules = nn.ModuleDict({"denoiser": denoiser, "text": text.encoder()})
    modules["text"].requires_grad_(False)
    return modules


def trained_in(folder: Path, device: str = "cpu") -> nn.ModuleDict:
    """Denoiser and text encoder with the best weights of the stage."""
    modules = build().to(device)
    load_best(modules, folder)
    return modules


def contexts(modules: Any, ids: Tensor, mask: Tensor, drop: Tensor | None = None) -> TextContext:
    """The denoiser's text context of tokenized texts; rows in `drop` get the null text.

    As `STDiT3.context`, but not cut to the longest text of the batch, since the blocks would be
    compiled again for each length.
    """
    denoiser = modules["denoiser"]
    with torch.no_grad():
        hidden = modules["text"](input_ids=ids, attention_mask=mask.long()).last_hidden_state
    if drop is not None:
        null = denoiser.null_text()[: ids.shape[1]].to(hidden.dtype)
        hidden = torch.where(drop[:, None, None], null[None], hidden)
    y_BLC = denoiser.y_embedder(hidden)
    blocks = [block.cross_attn.keys_values(y_BLC) for block in denoiser.blocks_in_order()]
    return TextContext(tuple(blocks), mask[:, None, None])


def to_denoise(form: Format, num_latents: int, count: int, rng: np.random.Generator) -> Tensor:
    """Random mask (count, T), True for frames to denoise, with the probabilities of `GIVEN`."""
    frames, mask = np.arange(num_latents), np.ones((count, num_latents), dtype=bool)
    draw, reached = rng.random(count)[:, None], 0.0
    for first, last, odds in GIVEN[form]:
        mine = (reached <= draw) & (draw < reached + odds)
        mask &= ~(mine & ((frames < first) | (frames >= num_latents - last)))
        reached += odds
    return torch.from_numpy(mask)


def noise_levels(form: Format, count: int, rng: np.random.Generator) -> Tensor:
    """Random noise levels (B,) in 0..1: mostly high, a fifth of them uniform."""
    ratio = float(rectified_flow.size_ratio(form.side, form.side, form.num_frames))
    logits = rng.normal(NOISE_MEAN + math.log(ratio), 1.2, count)
    high = 1 / (1 + np.exp(-logits))
    return torch.from_numpy(np.where(rng.random(count) < 0.2, rng.random(count), high)).float()


@dataclass(frozen=True)
class Material:
    """Training data of one format: latents, each clip's row of the wordings, the latents
    (N, C, T, h, w) of each background, and each clip's background."""

    form: Format
    latents: Latents
    rows_of_words: Tensor
    empty: Tensor
    grounds: Tensor
    reached: Any  # how far the odds reach at each clip, to draw by

    @classmethod
    def of(cls, form: Format, kept: Latents, vae: VideoVAE, words: text.Wordings) -> Material:
        motions = [scene.motion for scene in kept.scenes]
        odds = np.array([SHARES[motion] / motions.count(motion) for motion in motions])
        return cls(
            form, kept, words.rows_of(kept.scenes), latents.empty(vae, form),
            grounds_of(kept.scenes, kept.clips.device), odds.cumsum() / odds.sum(),
        )  # fmt: skip

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """Draw rows (B,) of clips, with motions in the ratio of their shares."""
        rows = np.searchsorted(self.reached, rng.random(count)).clip(max=len(self.reached) - 1)
        return world.sent(torch.from_numpy(rows), self.latents.clips.device)


class Batch(NamedTuple):
    """Inputs and targets of a step: x_t (B, C, T, h, w), its velocity and loss weights, noise
    levels (B,), captions' ids and mask (B, L), which captions are dropped (B,) and which latent
    frames are denoised (B, T)."""

    x_t: Tensor
    target: Tensor
    weight: Tensor
    s: Tensor
    ids: Tensor
    text_mask: Tensor
    drop: Tensor
    mask: Tensor


def draw_batch(
    material: Material, rows: Tensor, words: text.Wordings, rng: np.random.Generator,
    training: bool = True,
) -> Batch:  # fmt: skip
    """Clips with noise, given frames and captions drawn.

    In training some texts are dropped, and cells with the object or with changes have a larger
    weight: they are few, and geometry is learned last.
    """
    kept, device = material.latents, rows.device
    x0 = kept.clips[rows].float()
    mask = world.sent(to_denoise(material.form, x0.shape[2], len(rows), rng), device)
    # Two or more given frames are a clip to go on from; one is an image.
    alone = (~mask[:, 0] & mask[:, 1])[:, None, None, None, None]
    x0[:, :, :1] = torch.where(alone, kept.first[rows].float(), x0[:, :, :1])
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    noise = torch.randn(x0.shape, device=device, generator=generator)
    s = world.sent(noise_levels(material.form, len(rows), rng), device)
    drop = torch.from_numpy(rng.random(len(rows)) < (NULL_TEXT if training else 0.0))
    level = s[:, None, None, None, None] * mask[:, None, :, None, None]
    weight = mask[:, None, :, None, None].expand_as(x0)
    if training:
        away = (x0 - material.empty[material.grounds[rows]]).abs().amax(1, keepdim=True)
        weight = weight * (1 + OBJECT_WEIGHT * (away > 0.9) + CHANGE_WEIGHT * changing(x0))
    return Batch(
        (1 - level) * x0 + level * noise, x0 - noise, weight, s,
        *words.draw(material.rows_of_words[rows], rng), world.sent(drop, device), mask,
    )  # fmt: skip


def batch_loss(modules: Any, batch: Batch, form: Format) -> Tensor:
    """Mean squared error of the velocity over frames that are not given."""
    with autocast(batch.x_t.device):
        context = contexts(modules, batch.ids, batch.text_mask, batch.drop)
        out = velocity(modules, batch.x_t, batch.s, form, context, batch.mask)
    error = (out - batch.target).square()
    mean: Tensor = (error * batch.weight).sum() / batch.weight.sum()
    return mean


def changing(x0: Tensor) -> Tensor:
    """Whether a cell of latents (B, C, T, h, w) changes in time, (B, 1, 1, h, w).

    The first latent frame of each piece stands for one frame, the others for four.
    """
    pieces = x0.unflatten(2, (-1, 5))[:, :, :, 1:]
    moved = (pieces - pieces.mean((2, 3), keepdim=True)).abs().amax((1, 2, 3))
    return (moved > 0.5)[:, None, None]


def velocity(
    modules: Any, x_t: Tensor, s: Tensor, form: Format, context: Any, mask: Tensor | None
) -> Tensor:
    """The denoiser's predicted velocity (B, C, T, h, w) for `x_t` at noise levels `s`, float32."""
    out = modules["denoiser"](
        x_t, s * rectified_flow.NUM_TIMESTEPS, context, fps=float(world.FPS),
        height=float(form.side), width=float(form.side), x_mask=mask,
    )  # fmt: skip
    return out[:, : temporal.CHANNELS].float()


def task(work: Path, num_steps: int = 12_000, batch: int = 768, device: str = "cpu") -> Task:
    """The stage for `loop.train`; encodes its clips first, with the autoencoder in `work`.

    `batch` small clips a step, and a quarter as many large ones, which are twice as many tokens.
    """
    vae, counts = trained_vae(work, device), world.batch_sizes(batch)
    modules = build().to(device)
    denoiser: Any = modules["denoiser"]
    taught = nn.ModuleDict({"text": modules["text"]})
    load_best(taught, work / "text")
    scenes = [*world.train_scenes(), *world.held_out_scenes()]
    words = text.Wordings(scenes, 100, 24, device)
    training, held = [], []
    for form in FORMATS:
        kept = cached_latents(work, vae, form)
        training.append(Material.of(form, kept.part(slice(0, -NUM_HELD)), vae, words))
        held.append(Material.of(form, kept.part(slice(-NUM_HELD, None)), vae, words))
    trials = list(world.held_out_scenes())[::8] + list(world.train_scenes())[::72]

    def draw(step: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([23, step])
        return tuple(
            part
            for each, count in zip(training, counts, strict=True)
            for part in draw_batch(each, each.draw(count, rng), words, rng)
        )

    def loss(*drawn: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        half = len(Batch._fields)
        batches = (Batch(*drawn[:half]), Batch(*drawn[half:]))
        losses = {
            f"loss_{form.side}": batch_loss(modules, batch, form)
            for form, batch in zip(FORMATS, batches, strict=True)
        }
        return torch.stack(list(losses.values())).mean(), losses

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        figures: dict[str, float] = {}
        for each in held:
            name, rng = each.form.side, np.random.default_rng(25)
            rows = torch.arange(NUM_HELD, device=device)
            found = [
                batch_loss(modules, draw_batch(each, part, words, rng, False), each.form)
                for part in rows.split(32)
            ]
            figures[f"held_{name}"] = float(torch.stack(found).mean())
            some = trials if each.form == SMALL else trials[::2]
            right = read_back(sample(modules, vae, some, each.form, seed=26), some)
            figures |= {f"{key}_{name}": value for key, value in right.items()}
        return {"score": -sum(figures[f"held_{form.side}"] for form in FORMATS), **figures}

    return Task(
        modules, draw, loss, validate, clips_per_step=sum(counts), num_steps=num_steps,
        learning_rate=2e-3, weight_decay=0.01, warmup=min(200, num_steps // 10),
        ema=0.9995, num_validations=5,
        muon=("denoiser.spatial_blocks", "denoiser.temporal_blocks"),
        compilable=tuple(denoiser.blocks_in_order()),
    )  # fmt: skip


@torch.no_grad()
def sample(
    modules: Any, vae: VideoVAE, scenes: list[Scene], form: Format, *, seed: int,
    prompts: list[str] | None = None, guidance: float = GUIDANCE,
    num_steps: int = NUM_STEPS, shift: float = SHIFT,
) -> world.Floats:  # fmt: skip
    """Clips (B, T, H, W, 3) by Euler steps, of plain captions unless `prompts` are given.

    For previews in training, and to choose steps and guidance. The final evaluation uses
    `everyframe.generate`.
    """
    device = vae.shift.device
    generator = torch.Generator().manual_seed(seed)
    texts = [captions.plain_caption(scene) for scene in scenes] if prompts is None else prompts
    ids, mask = (each.to(device) for each in text.tokenize(texts, text.tokenizer()))
    num_latents, side = form.num_frames // temporal.PIECE * 5, form.side // 8
    drop = torch.arange(2 * len(scenes), device=device) >= len(scenes)
    context = contexts(modules, torch.cat([ids, ids]), torch.cat([mask, mask]), drop)
    shape = len(scenes), temporal.CHANNELS, num_latents, side, side
    x = torch.randn(shape, generator=generator).to(device)
    levels = rectified_flow.schedule(
        num_steps, resolution=(form.side, form.side), num_frames=form.num_frames, shift=shift
    )[:, 0]
    for s, following in pairwise((levels / rectified_flow.NUM_TIMESTEPS).tolist()):
        now = torch.full((2 * len(x),), s, device=device)
        out = velocity(modules, torch.cat([x, x]), now, form, context, None)
        with_text, without = out.chunk(2)
        x = x + (without + guidance * (with_text - without)) * (s - following)
    frames = [vae.decode(part, form.num_frames) for part in torch.split(x, 8)]
    return world.pictures(torch.cat(frames).transpose(1, 2))


def read_back(
    frames: world.Floats, scenes: list[Scene], each: Callable[..., Iterable[reader.Reading]] = map
) -> dict[str, float]:
    """Share of clips in which each attribute, and all of them, is read as requested.

    `each` is a pool's `map` where several processes read.
    """
    found = zip(each(reader.read, frames), scenes, strict=True)
    read = [reading.right(scene) for reading, scene in found]
    shares = {name: float(np.mean([row[name] for row in read])) for name in read[0]}
    return {**shares, "all": float(np.mean([all(row.values()) for row in read]))}
