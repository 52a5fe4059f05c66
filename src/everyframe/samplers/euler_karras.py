"""Euler sampler on Karras sigmas with v-prediction, as Stable Video Diffusion samples.

The state at noise level sigma is ``x0 + sigma noise``. The model is given ``x / sqrt(sigma^2 + 1)``
and the timestep ``log(sigma) / 4`` and predicts v, from which ``x0 = x / (sigma^2 + 1) - v sigma /
sqrt(sigma^2 + 1)``. Karras et al. 2022 (arXiv 2206.00364), equation 5 and algorithm 1 without
churn; v-prediction is Salimans and Ho 2022 (arXiv 2202.00512), appendix D.

Sigmas and their squares are float32 at least: 700 squared is infinite in half precision. The order
of operations is that of diffusers' `EulerDiscreteScheduler`, so a float32 run matches it bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, Step, as_state, check_start
from everyframe.samplers.multistep import DiffusionPath

#: Karras' exponent: larger values put more steps at low noise.
RHO = 7.0


def schedule(num_steps: int, sigma_min: float, sigma_max: float, rho: float = RHO) -> Tensor:
    """Sigmas (num_steps + 1,) from `sigma_max` down to `sigma_min`, then 0; float64, on the CPU."""
    if num_steps < 1:
        raise InputError(f"a sampler needs 1 step or more, got {num_steps}")
    if not 0 < sigma_min <= sigma_max:
        raise InputError(f"sigmas must rise from above 0, got {sigma_min:g} to {sigma_max:g}")
    ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64, device="cpu")
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    sigmas = (high + ramp * (low - high)) ** rho
    return torch.cat([sigmas, torch.zeros(1, dtype=torch.float64, device="cpu")])


def start_scale(sigmas: Tensor) -> Tensor:
    """Scale of the initial unit-variance noise: ``sqrt(sigma^2 + 1)``.

    Karras uses sigma. diffusers' "leading" timesteps, which Stable Video Diffusion was released
    with, include the variance of the data.
    """
    return (sigmas[0].to(torch.float32) ** 2 + 1) ** 0.5


def sample(denoise: Denoise, x: Tensor, sigmas: Tensor, *, start: int = 0) -> Iterator[Step]:
    """Euler steps from x (B, ...) at ``sigmas[start]`` along `sigmas` (see `schedule`)."""
    num_steps = len(sigmas) - 1
    check_start(start, num_steps)
    x = as_state(x)
    # Scalars of the state's precision, on the CPU, which combine with tensors of any device.
    levels = sigmas.to("cpu", x.dtype)

    def clean() -> Tensor:
        return x0

    for index in range(start, num_steps):
        sigma, following = levels[index], levels[index + 1]
        t, x0 = predict_clean(denoise, x, sigma)
        x = x + (x - x0) / sigma * (following - sigma)
        yield Step(index, num_steps, t, x, clean=clean)


def predict_clean(denoise: Denoise, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Timestep (B,) and x0 of the state x (B, ...) at the level `sigma`, a number on the CPU."""
    variance = sigma**2 + 1
    t = (0.25 * sigma.log()).expand(x.shape[0]).to(x.device)
    v = denoise(x / variance**0.5, t).to(x.dtype)
    return t, v * (-sigma / variance**0.5) + x / variance


def path(sigmas: Tensor) -> DiffusionPath:
    """The path of `sample` along `sigmas`, for the solvers of `multistep`."""
    levels = tuple(sigmas.tolist())

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        sigma = levels[index]
        variance = sigma**2 + 1
        t = x.new_full((x.shape[0],), 0.25 * math.log(sigma))
        v = denoise(x / variance**0.5, t).to(x.dtype)
        return t, v * (-sigma / variance**0.5) + x / variance

    return DiffusionPath((1.0,) * len(levels), levels, predict)
