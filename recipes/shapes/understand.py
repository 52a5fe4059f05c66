"""Stage 3: the text encoder (T5) learns what captions say, before the denoiser is trained with it.

Every token's state must tell, through one linear layer, each of the four attributes of its scene.
Real text-to-video models stand on a text encoder that was trained on text; a T5 with random weights
would have to learn its words through the denoiser, which takes most of the denoiser's time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Scene
from recipes.shapes import text, world
from recipes.shapes.loop import Task

ATTRIBUTES = {
    "shape": tuple(SHAPES), "colour": tuple(COLOURS),
    "background": tuple(BACKGROUNDS), "motion": tuple(MOTIONS),
}  # fmt: skip


def build() -> nn.ModuleDict:
    """The encoder and the layer that is only there to train it."""
    num_classes = sum(len(names) for names in ATTRIBUTES.values())
    head = nn.Linear(text.T5_SIZES["d_model"], num_classes)
    return nn.ModuleDict({"text": text.encoder(), "head": head})


def task(num_steps: int = 2000, batch: int = 64) -> Task:
    """The stage for `loop.train`; the score is the share of captions of which all is told right."""
    modules, words = build(), text.Captions()
    scenes = world.train_scenes()
    held = list(world.held_out_scenes()) * 2

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([51, step])
        chosen = [scenes[i] for i in rng.integers(len(scenes), size=batch)]
        logits, mask = told(modules, chosen, words, rng)
        losses = [
            nn.functional.cross_entropy(part[mask], answer[:, None].expand_as(mask)[mask])
            for part, answer in zip(logits, answers(chosen), strict=True)
        ]
        total = torch.stack(losses).sum()
        return total, {}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        logits, mask = told(modules, held, words, np.random.default_rng(52))
        right = torch.ones(len(held), dtype=torch.bool)
        for part, answer in zip(logits, answers(held), strict=True):
            wrong = (part.argmax(-1) != answer[:, None]) & mask
            right &= ~wrong.any(dim=1)
        return {"score": float(right.float().mean())}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        warmup=100, ema=0.99, validate_every=500, print_every=250,
    )  # fmt: skip


def told(
    modules: nn.ModuleDict, scenes: list[Scene], words: text.Captions, rng: np.random.Generator
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Logits (B, L, classes) of each attribute at each token of the scenes' captions; the mask."""
    ids, mask = words(scenes, rng)
    states = modules["text"](input_ids=ids, attention_mask=mask.long()).last_hidden_state
    sizes = [len(names) for names in ATTRIBUTES.values()]
    return modules["head"](states).split(sizes, dim=-1), mask


def answers(scenes: list[Scene]) -> list[Tensor]:
    """For each attribute, the index of each scene's own (B,)."""
    return [
        torch.tensor([names.index(getattr(scene, name)) for scene in scenes])
        for name, names in ATTRIBUTES.items()
    ]
