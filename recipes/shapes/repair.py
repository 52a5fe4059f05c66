"""Repairs a trained denoiser that gets motions wrong: stages `direction`, `repair` and `settle`.

What is wrong is learned from clips. What is right is learned from the denoiser that had it right,
told the scene in the plainest words: its answers hold no noise, so that little is disturbed by the
way. Runs after `apart`, which moves words apart that the text encoder takes for one. In the end the
denoiser settles, on all clips, with the text encoder of `agree`, which is not trained any more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from recipes.shapes.denoiser import Draws, take_text, task, trained_in
from recipes.shapes.loop import Task

#: A short stretch to learn which way a size changes, which is decided at once if at all: where a
#: denoiser answers with the mean of both ways, every later step only follows chance.
DIRECTION = Draws({
    "right": 0.05, "left": 0.05, "up": 0.05, "down": 0.05, "still": 0.04,
    "growing": 0.34, "shrinking": 0.34, "turning": 0.08,
}, early=("growing", "shrinking"), kept=("right", "left", "up", "down", "still"))  # fmt: skip
#: What is wrong is learned from clips, what is right from the denoiser that had it right.
REPAIR = Draws({
    "right": 0.07, "left": 0.07, "up": 0.07, "down": 0.07, "still": 0.06,
    "growing": 0.16, "shrinking": 0.16, "turning": 0.34,
}, kept=("right", "left", "up", "down", "still"))  # fmt: skip

#: All motions from clips alone, those that fell apart more often than the others.
SETTLE = Draws({
    "right": 0.14, "left": 0.14, "up": 0.14, "down": 0.14, "still": 0.1,
    "growing": 0.08, "shrinking": 0.08, "turning": 0.18,
})  # fmt: skip


def direction_task(work: Path, num_steps: int = 180, batch: int = 32) -> Task:
    """A stretch on `DIRECTION`, of a trained denoiser with the text encoder of stage `apart`."""
    modules = trained_in(work / "denoiser")
    take_text(modules, work / "apart")
    short = task(work, num_steps, batch, DIRECTION, modules, trained_in(work / "denoiser"))

    def validate(averaged: nn.ModuleDict) -> dict[str, float]:
        measured = short.validate(averaged)
        return {**measured, "score": measured["told"]}

    return replace(
        short, validate=validate, learning_rate=1e-3, warmup=15, ema=0.9, validate_every=60
    )


def repair_task(work: Path, num_steps: int = 1500, batch: int = 64) -> Task:
    """Goes on from `direction` with `REPAIR`, at all noise levels."""
    modules = trained_in(work / "direction")
    whole = task(work, num_steps, batch, REPAIR, modules, trained_in(work / "denoiser"))
    return replace(whole, learning_rate=8e-4, warmup=40)


def settle_task(work: Path, num_steps: int = 900, batch: int = 64) -> Task:
    """Goes on with the text encoder of `agree` as it is: its words would drift together again."""
    modules = repaired(work)
    take_text(modules, work / "agree")
    modules["text"].requires_grad_(False)
    whole = task(work, num_steps, batch, SETTLE, modules)
    return replace(whole, learning_rate=6e-4, warmup=30)


def repaired(work: Path) -> nn.ModuleDict:
    """The denoiser and its text encoder before they settle."""
    return _last(work, "repair", "denoiser")


def trained(work: Path) -> nn.ModuleDict:
    """The denoiser and its text encoder with the best weights of the last stage that has run."""
    return _last(work, "settle", "repair", "denoiser")


def _last(work: Path, *stages: str) -> nn.ModuleDict:
    return trained_in(next(work / each for each in stages if (work / each / "best.pt").exists()))
