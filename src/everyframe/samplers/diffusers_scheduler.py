"""Sampling along one of diffusers' schedulers, whichever a checkpoint was released with.

The scheduler knows the noise levels, what the model is to be given and how a step is made; here is
the loop around it, and what inpainting adds for a model that knows no masks: after each step the
known latents, with as much noise as the step has left, are put back outside of the mask (Avrahami
et al. 2022, "Blended Latent Diffusion", arXiv 2206.02779). The order of operations is that of
diffusers' inpainting pipelines. Not here: guidance, which the denoiser has inside.
Read next: `step`.
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


@dataclass(frozen=True, eq=False)
class KnownLatents:
    """What stays: clean latents (B, C, h, w), mask (B, 1, h, w) with 1 where it is denoised, and
    the noise (B, C, h, w) that is added to them."""

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
    """From x (B, ...) at ``timesteps[start]`` along `timesteps`, which `scheduler` is set to.

    `scheduler` is fresh: it counts its steps and remembers earlier answers, which is the `memory`
    of a step, and what a `start` in the middle needs. `generators` gives those of one step, one for
    each of the batch, to a scheduler that draws noise.
    """
    num_steps = len(timesteps)
    check_start(start, num_steps)
    if start:
        if memory is None:
            raise InputError(
                f"a scheduler goes on at step {start} with the memory of the one before"
            )
        vars(scheduler).update(memory)
    draws = "generator" in inspect.signature(scheduler.step).parameters
    for index in range(start, num_steps):
        t = timesteps[index]
        given = scheduler.scale_model_input(x, t)
        answer = denoise(given, t.expand(x.shape[0]).to(x.device))
        noise = {"generator": generators(index)} if draws and generators is not None else {}
        x = scheduler.step(answer, t, x, return_dict=False, **noise)[0]
        if known is not None:
            kept = known.latents
            if index < num_steps - 1:
                following = torch.tensor([timesteps[index + 1]])
                kept = scheduler.add_noise(kept, known.noise, following)
            x = (1 - known.mask) * kept + known.mask * x
        yield Step(index, num_steps, t.expand(x.shape[0]), x, _memory(scheduler))


def _memory(scheduler: Any) -> dict[str, Any]:
    """Everything that a scheduler is, but its config; lists are its own and are copied."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(scheduler).items()
        if name != "_internal_dict"
    }
