"""Puts together what a trained text encoder says of one motion in different wordings.

The encoder of `shapes` hardly used the order of words: its position biases had stayed near 0, and
"from right to left" was right to it as "from left to right" was. What lies between two motions a
denoiser draws as neither. This stage moves each caption's states
along the directions in which motions differ, until the caption says what its motion's captions say
on average, and leaves them where they are in all other directions. Run after `apart`; the denoiser
goes on with it in `settle`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import MOTIONS, Scene
from recipes.shapes import text, understand, world
from recipes.shapes.apart import mean_states
from recipes.shapes.loop import Task
from recipes.shapes.repair import repaired

LOOK_BACK = (
    60.0  # in logits, which T5 doesn't scale: those of what the first layer reads are 14 to 25
)


def task(work: Path, num_steps: int = 3000, batch: int = 64) -> Task:
    """Trains the encoder of the denoiser in `work` so that wordings of one motion agree."""
    modules, words, scenes = understand.build(), text.Captions(), world.train_scenes()
    modules["text"].load_state_dict(repaired(work)["text"].state_dict())
    before = copy.deepcopy(modules["text"]).eval().requires_grad_(False)
    look_back(modules["text"])
    meant = Meant(mean_states(before, words))

    def drawn(chosen: list[Scene], rng: np.random.Generator) -> Drawn:
        """Captions of the scenes, where their states were, and where they ought to be."""
        ids, mask = words(chosen, rng)
        was = before(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return Drawn(ids, mask, was, meant.shift(text.pooled(was, mask), chosen))

    def states(of: Drawn) -> Tensor:
        found = modules["text"](input_ids=of.ids, attention_mask=of.mask.long())
        return torch.as_tensor(found.last_hidden_state)

    def distance(of: Drawn) -> tuple[Tensor, Tensor]:
        """Squared distances of states from where they ought to be, along the directions in which
        motions differ, and across them."""
        error = (states(of) - of.was - of.shift[:, None])[of.mask]
        along = (error @ meant.axes).square().sum(-1).mean()
        return along, error.square().sum(-1).mean() - along

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([57, step])
        several = drawn([scenes[i] for i in rng.integers(len(scenes), size=3 * batch)], rng)
        # Half of a batch are the captions that are farthest off: most are where they ought to be.
        with torch.no_grad():
            missed = several.was + several.shift[:, None] - states(several)
        off = text.pooled(missed @ meant.axes, several.mask).norm(dim=-1)
        farthest = off.argsort(descending=True)[: batch // 2]
        along, across = distance(several.rows(torch.cat([farthest, torch.arange(batch // 2)])))
        return 10 * along + across, {"along": along.item(), "across": across.item()}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        chosen = list(world.held_out_scenes()) * 4
        of = drawn(chosen, np.random.default_rng(58))
        along, across = distance(of)
        told = meant.nearest(text.pooled(states(of), of.mask), chosen)
        return {"score": -float(10 * along + across), "along": float(along), "told": float(told)}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=2e-3,
        warmup=50, ema=0.98, validate_every=500, print_every=100,
    )  # fmt: skip


@torch.no_grad()
def look_back(encoder: Any) -> None:
    """Turns one head of the T5 `encoder` to the word before: what follows "to" is where it goes.

    All layers share the first one's biases, (buckets, heads), where bucket 1 is one word back.
    """
    first = encoder.encoder.block[0].layer[0].SelfAttention
    first.relative_attention_bias.weight[1, -1] += LOOK_BACK


@dataclass(frozen=True)
class Drawn:
    """Captions: ids and mask (B, L), their states before (B, L, C), and by what each caption's
    states ought to move (B, C)."""

    ids: Tensor
    mask: Tensor
    was: Tensor
    shift: Tensor

    def rows(self, index: Tensor) -> Drawn:
        """Those of some captions."""
        return Drawn(self.ids[index], self.mask[index], self.was[index], self.shift[index])


class Meant:
    """Where captions' mean states ought to lie by what they say, from the mean of each value."""

    def __init__(self, means: dict[tuple[str, str], Tensor]) -> None:
        self.means = means
        self.centre = {
            name: torch.stack([means[name, value] for value in values]).mean(0)
            for name, values in understand.ATTRIBUTES.items()
        }
        self.motions = torch.stack([means["motion", motion] for motion in MOTIONS])
        #: (C, 7): an orthonormal basis of the directions in which motions differ.
        self.axes = torch.linalg.qr((self.motions[1:] - self.motions[:1]).T).Q

    def of_motion(self, states: Tensor, scenes: list[Scene]) -> Tensor:
        """Mean states (B, C) of the scenes' captions without what their other values add."""
        others = [name for name in self.centre if name != "motion"]
        added = [
            sum(self.means[name, getattr(scene, name)] - self.centre[name] for name in others)
            for scene in scenes
        ]
        return states - torch.stack([torch.as_tensor(each) for each in added])

    def shift(self, states: Tensor, scenes: list[Scene]) -> Tensor:
        """By what (B, C), along the motions' directions, each caption misses its motion's mean."""
        goal = torch.stack([self.means["motion", scene.motion] for scene in scenes])
        return (goal - self.of_motion(states, scenes)) @ self.axes @ self.axes.T

    def nearest(self, states: Tensor, scenes: list[Scene]) -> Tensor:
        """The share of captions that lie nearest to their own motion's mean."""
        apart = torch.cdist(self.of_motion(states, scenes), self.motions)
        own = torch.tensor([list(MOTIONS).index(scene.motion) for scene in scenes])
        return (apart.argmin(1) == own).float().mean()
