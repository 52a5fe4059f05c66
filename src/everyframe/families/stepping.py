"""The loop that every denoising stage has: each take through its sampler, each step an event.

Each state is looked at by the stage's guard, and what that repaired comes before the step's event.

Not here: which sampler, and what it is given; that is the family's. Read next: `family.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from everyframe.core.events import Event, Step
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.samplers.step import Step as SamplerStep


def denoised(
    stage: str,
    takes: Sequence[Take],
    num_steps: int,
    guard: Guard,
    sample: Callable[[Take], Iterator[SamplerStep]],
) -> Iterator[Event]:
    """Fill each take's `latents` with what `sample` makes of it; `num_steps` is of all takes."""
    done = 0
    for take in takes:
        begun = time.perf_counter()
        guard.take(take.seed)
        for step in sample(take):
            guard.latents(step.index + 1, step.x)
            yield from guard.events()
            now = time.perf_counter()
            done += 1
            take.latents = step.x
            yield Step(stage, done, num_steps, take.seed, now - begun)
            begun = now
        take.latents = take.latents.to("cpu")
