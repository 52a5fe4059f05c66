"""Moves values apart that a trained text encoder has let lie close together.

That a layer can tell two values from each other is not enough: what is close together in the text
encoder's states, a denoiser takes for one and the same, and then nothing in its training pulls them
apart again (growing and shrinking were 0.6 apart here, other motions 1.4 to 2.4, and half of the
clips went the wrong way). This stage moves such values apart in the encoder of a trained denoiser
and leaves everything else where it is. Run next: the denoiser's `direction` stage.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import Scene
from recipes.shapes import text, understand, world
from recipes.shapes.denoiser import trained_in
from recipes.shapes.loop import Task

CLOSE = 1.2  # mean states of two values that are less than this apart are moved apart
PUSH = 2.0  # by how much each of them


def task(work: Path, num_steps: int = 2000, batch: int = 64) -> Task:
    """Trains the encoder of the denoiser in `work` to move apart the values that are too close.

    The target of a token's state is what it was, plus its scene's codes: a direction of its own for
    each value that was close to another one, across everything that values differ in so far.
    """
    modules, words, scenes = understand.build(), text.Captions(), world.train_scenes()
    modules["text"].load_state_dict(trained_in(work / "denoiser")["text"].state_dict())
    before = copy.deepcopy(modules["text"]).eval()
    codes = codes_apart(mean_states(before, words))
    if not codes:
        raise SystemExit(f"no two values' states are closer than {CLOSE}; nothing to move apart")
    axes = torch.stack(list(codes.values())) / PUSH
    moving = [scene for scene in scenes if bool(sum_of_codes(scene, codes).any())]

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rng = np.random.default_rng([53, step])
        chosen = [
            known[int(rng.integers(len(known)))]
            for known in (scenes, moving)
            for _ in range(batch // 2)
        ]
        along, across = distance(chosen, rng)
        return 10 * along + across, {"along": along.item(), "across": across.item()}

    def distance(chosen: list[Scene], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Squared distances from the targets: along the codes' directions, and across them."""
        ids, mask = words(chosen, rng)
        after, target = (
            encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            for encoder in (modules["text"], before)
        )
        moved = torch.stack([sum_of_codes(scene, codes) for scene in chosen])
        error = (after - target.detach() - moved[:, None])[mask]
        along = (error @ axes.T).square().sum(-1).mean()
        return along, error.square().sum(-1).mean() - along

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        along, across = distance(list(world.held_out_scenes()), np.random.default_rng(54))
        return {"score": -float(10 * along + across), "along": float(along)}

    return Task(
        modules, loss, validate, clips_per_step=batch, num_steps=num_steps, learning_rate=3e-4,
        warmup=50, ema=0.98, validate_every=500, print_every=100,
    )  # fmt: skip


@torch.no_grad()
def mean_states(encoder: Any, words: text.Captions) -> dict[tuple[str, str], Tensor]:
    """For each (attribute, value) the mean state (C,) over all tokens of captions that say it."""
    scenes, rng = list(world.train_scenes()), np.random.default_rng(55)
    ids, mask = words(scenes, rng)
    states = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    of_caption = text.pooled(states, mask)
    return {
        (name, value): of_caption[[getattr(scene, name) == value for scene in scenes]].mean(0)
        for name, values in understand.ATTRIBUTES.items()
        for value in values
    }


def codes_apart(means: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """A code (C,) of length `PUSH` for each value that is close to another of its attribute.

    Codes are orthogonal to each other and to all differences between mean states.
    """
    close = [
        one
        for one in means
        if any(
            other != one and other[0] == one[0] and torch.dist(means[one], means[other]) < CLOSE
            for other in means
        )
    ]
    known = torch.stack(list(means.values()))
    drawn = torch.randn(len(close), known.shape[1], generator=torch.Generator().manual_seed(56))
    basis = torch.linalg.qr(torch.cat([known, drawn]).T).Q.T[len(known) :]
    return dict(zip(close, PUSH * basis, strict=True))


def sum_of_codes(scene: Scene, codes: dict[tuple[str, str], Tensor]) -> Tensor:
    """(C,): the codes of all of a scene's values that have one."""
    zero = torch.zeros(text.T5_SIZES["d_model"])
    return sum(
        (codes.get((name, getattr(scene, name)), zero) for name in understand.ATTRIBUTES), zero
    )
