"""Sampling with a diffusers scheduler, whichever a checkpoint ships with.

The scheduler defines noise levels, model input and step formula; this module is the loop around it.
For inpainting with a model without mask input, the known latents, noised to the level of the step,
replace the result outside of the mask after each step (Avrahami et al. 2022, "Blended Latent
Diffusion", arXiv 2206.02779). The order of operations is that of diffusers' inpainting pipelines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, Step, check_start
from everyframe.samplers.clean_prediction import predicted_clean


@dataclass(frozen=True, eq=False)
class KnownLatents:
    """Known content in inpainting.

    Attributes:
        latents: clean latents (B, C, h, w).
        mask: (B, 1, h, w), 1 where it is denoised.
        noise: (B, C, h, w), added to the latents.
    """

    latents: Tensor
    mask: Tensor
    noise: Tensor


def sample(
    denoise: Denoise,
    x: Tensor,
    scheduler: Any,
    timesteps: Tensor,
    *,
    known: KnownLatents | None = None,
    generators: Callable[[int], list[torch.Generator]] | None = None,
    start: int = 0,
    memory: Mapping[str, Any] | None = None,
) -> Iterator[Step]:
    """Sample from x (B, ...) at ``timesteps[start]`` along `timesteps`.

    `scheduler` is fresh and set to `timesteps`. It counts steps and stores earlier outputs: that is
    a step's `memory`, which a `start` above 0 needs. `generators` returns the generators of a step,
    one per sample, for schedulers that draw noise.
    """
    num_steps = len(timesteps)
    check_start(start, num_steps)
    if start:
        if memory is None:
            raise InputError(
                f"a scheduler resumes at step {start} with the state of the step before"
            )
        vars(scheduler).update(memory)
    draws = "generator" in inspect.signature(scheduler.step).parameters

    def clean() -> Tensor:
        found = predicted_clean(scheduler, answer, t, before)
        return x if found is None else found

    for index in range(start, num_steps):
        t = timesteps[index]
        given = scheduler.scale_model_input(x, t)
        answer = denoise(given, t.expand(x.shape[0]).to(x.device))
        noise = {"generator": generators(index)} if draws and generators is not None else {}
        before = x
        x = scheduler.step(answer, t, x, return_dict=False, **noise)[0]
        if known is not None:
            kept = known.latents
            if index < num_steps - 1:
                following = timesteps[index + 1 : index + 2]
                kept = scheduler.add_noise(kept, known.noise, following)
            x = (1 - known.mask) * kept + known.mask * x
        yield Step(index, num_steps, t.expand(x.shape[0]), x, _memory(scheduler), clean=clean)


def _memory(scheduler: Any) -> dict[str, Any]:
    """State of a scheduler without its config; lists are copied."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(scheduler).items()
        if name != "_internal_dict"
    }
