"""The loop that every denoising stage has: each take through its sampler, each step an event.

After each step the take says how far it is, so that a run that is broken off goes on from there.
Each state is looked at by the stage's guard, and what that repaired comes before the step's event.

Not here: which sampler, and what it is given; that is the family's. Read next: `family.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everyframe.core.events import Event, Step
from everyframe.families.family import Stage, Take
from everyframe.families.guarding import Guard
from everyframe.families.job import Job
from everyframe.families.sharded import PutOn
from everyframe.samplers.step import Step as SamplerStep


@dataclass(frozen=True)
class Lot:
    """Batches of a take that are worked on at the same time, by `count` ranks; one as a rule.

    `steps` are those of this rank's batch, and the state after the last is that of them all. When
    they are over, `end` steps of the take are done: those of each batch count.
    """

    steps: Iterator[SamplerStep]
    end: int
    count: int = 1


Lots = Callable[[Take], Iterable[Lot]]
"""A take's lots from that one on which `Take.step` is in, begun at that step."""


def denoised(
    stage: str, takes: Sequence[Take], num_steps: int, guard: Guard, lots: Lots
) -> Iterator[Event]:
    """Fill each take's `latents` with what its samplers make of it, one lot after the other.

    `num_steps` is of one take. The latents of several batches are joined along the first axis.
    """
    for number, take in enumerate(takes):
        if take.step == num_steps:
            continue  # done before the run was broken off
        begun = time.perf_counter()
        guard.take(take)
        for lot in lots(take):
            for step in lot.steps:
                guard.latents(step.index + 1, step.x)
                yield from guard.events()
                left = step.num_steps - 1 - step.index
                _take_step(take, step, lot.end if not left else take.step + 1, num_steps)
                now = time.perf_counter()
                # Steps of batches that other ranks have count as they go on, too.
                done = number * num_steps + lot.end - left * lot.count
                yield Step(stage, done, len(takes) * num_steps, take.seed, now - begun)
                begun = now


def denoised_in_step(
    stage: Stage,
    job: Job[Any],
    model: nn.Module,
    put_on: PutOn,
    takes: Sequence[Take],
    sample: Callable[[Guard, Take], Iterator[SamplerStep]],
) -> Iterator[Event]:
    """Fill each take's `latents` by a denoiser that all ranks of a video call together.

    `put_on` is what was put on it for them, and is taken off. ``sample(guard, take)`` are a take's
    steps, from that one on which it is in.
    """
    with put_on:
        apart = put_on.apart if put_on.team.size > 1 else None
        guard = job.guard(stage.name, {stage.component: model}, apart)
        steps = job.settings.num_inference_steps

        def lots(take: Take) -> Iterator[Lot]:
            yield Lot(sample(guard, take), steps)

        yield from denoised(stage.name, takes, steps, guard, lots)


def _take_step(take: Take, step: SamplerStep, done: int, num_steps: int) -> None:
    """Put the state after a step into its take, whole at every moment in which others see it."""
    take.step = done
    take.latents, take.memory = step.x, step.memory
    if step.index + 1 == step.num_steps:
        take.finished = (*take.finished, step.x.to("cpu"))
        take.latents = take.memory = None
    if done == num_steps:
        take.latents = torch.cat(take.finished) if len(take.finished) > 1 else take.finished[0]
        take.finished = ()
