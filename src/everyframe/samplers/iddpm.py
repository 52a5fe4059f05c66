"""Improved DDPM: ancestral sampling with a learned variance, as Open-Sora 1.0 samples.

Nichol and Dhariwal 2021 (arXiv 2102.09672): linear betas over 1000 steps, respaced to fewer. The
model predicts noise and, per element, the position of the variance between two bounds. Coefficients
are float64. Like upstream, predicted x0 is not clipped. The caller applies guidance (upstream
guides three of four channels, see `guidance`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, Noise, Step, as_state, check_start
from everyframe.samplers.multistep import DiffusionPath


@dataclass(frozen=True, eq=False)
class Schedule:
    """Respaced betas (N,) float64 and their original timesteps (N,) int64, low to high."""

    betas: Tensor
    timestep_map: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.betas)


def schedule(
    num_steps: int,
    *,
    num_timesteps: int = 1000,
    beta_start: float = 1e-4,
    beta_end: float = 2e-2,
) -> Schedule:
    """Choose `num_steps` of `num_timesteps`, evenly spaced, both ends included.

    Upstream accumulates its stride, so a point halfway between two timesteps (499.5, for every odd
    `num_steps`) goes to the one that the sum's rounding selects. With a product, 278 step counts of
    1000 would select another timestep.
    """
    if not 1 <= num_steps <= num_timesteps:
        raise InputError(f"IDDPM needs 1 to {num_timesteps} steps, got {num_steps}")
    # Betas are defined for 1000 steps; fewer, larger ones cover the same noise.
    stretch = 1000 / num_timesteps
    betas = torch.linspace(
        stretch * beta_start,
        stretch * beta_end,
        num_timesteps,
        dtype=torch.float64,
        device="cpu",
    )
    stride = (num_timesteps - 1) / (num_steps - 1) if num_steps > 1 else 0.0
    places = itertools.accumulate([0.0, *[stride] * (num_steps - 1)])
    timestep_map = torch.tensor([round(place) for place in places], device="cpu")
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)[timestep_map]
    return Schedule(betas=1.0 - alphas_cumprod / _before(alphas_cumprod), timestep_map=timestep_map)


def _before(alphas_cumprod: Tensor) -> Tensor:
    """Signal share one level lower; 1 below the lowest."""
    return torch.cat([torch.ones_like(alphas_cumprod[:1]), alphas_cumprod[:-1]])


@dataclass(frozen=True)
class _Coefficients:
    """Coefficients of one step: x0 from x and noise, mean from x0 and x, variance bounds."""

    x0_of_x: float
    x0_of_eps: float
    mean_of_x0: float
    mean_of_x: float
    log_variance_low: float
    log_variance_high: float


def _coefficients(plan: Schedule) -> list[_Coefficients]:
    alphas_cumprod = torch.cumprod(1.0 - plan.betas, dim=0)
    previous = _before(alphas_cumprod)
    variance = plan.betas * (1.0 - previous) / (1.0 - alphas_cumprod)
    # The first is 0, whose logarithm is not used: no noise is added in the last step.
    variance[0] = variance[1] if len(variance) > 1 else plan.betas[0]
    columns = (
        torch.sqrt(1.0 / alphas_cumprod),
        torch.sqrt(1.0 / alphas_cumprod - 1.0),
        plan.betas * torch.sqrt(previous) / (1.0 - alphas_cumprod),
        (1.0 - previous) * torch.sqrt(1.0 - plan.betas) / (1.0 - alphas_cumprod),
        torch.log(variance),
        torch.log(plan.betas),
    )
    return [_Coefficients(*row) for row in torch.stack(columns, dim=1).tolist()]


def sample(
    denoise: Denoise,
    x: Tensor,
    plan: Schedule,
    noise: Noise,
    *,
    start: int = 0,
) -> Iterator[Step]:
    """Sample from noise x (B, C, ...), the highest timestep first.

    ``denoise(x, t)`` is called with original timesteps (B,) and returns (B, 2C, ...): guided noise,
    then the position of the variance between its bounds (-1 low, 1 high). ``noise(step)`` counts
    steps in running order and is not called for the last one.
    """
    num_steps = plan.num_steps
    check_start(start, num_steps)
    coefficients = _coefficients(plan)
    timestep_map = plan.timestep_map.tolist()
    x = as_state(x)

    def clean() -> Tensor:
        return x0

    for index in range(start, num_steps):
        level = num_steps - 1 - index
        t = torch.full((x.shape[0],), timestep_map[level], dtype=x.dtype, device=x.device)
        eps, place = _noise_and_variance(denoise(x, t).to(x.dtype), x)
        c = coefficients[level]
        x0 = c.x0_of_x * x - c.x0_of_eps * eps
        mean = c.mean_of_x0 * x0 + c.mean_of_x * x
        x = mean if level == 0 else mean + _deviation(place, c) * noise(index).to(x.device, x.dtype)
        yield Step(index, num_steps, t, x, clean=clean)


def _noise_and_variance(answer: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    if answer.shape[1] != 2 * x.shape[1]:
        raise InputError(
            f"IDDPM needs a model with {2 * x.shape[1]} output channels (noise and variance "
            f"of {x.shape[1]}), got {answer.shape[1]}"
        )
    return answer.chunk(2, dim=1)


def path(plan: Schedule) -> DiffusionPath:
    """The path of `sample` without added noise, for the solvers of `multistep`.

    They ignore the learned variance and solve the probability flow: from the same noise comes
    another video than by `sample`, which draws noise in each step.
    """
    alphas_cumprod = torch.cumprod(1.0 - plan.betas, dim=0).flip(0)
    alphas = (*torch.sqrt(alphas_cumprod).tolist(), 1.0)
    sigmas = (*torch.sqrt(1.0 - alphas_cumprod).tolist(), 0.0)
    timesteps = plan.timestep_map.flip(0).tolist()

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        t = x.new_full((x.shape[0],), timesteps[index])
        eps, _ = _noise_and_variance(denoise(x, t).to(x.dtype), x)
        return t, (x - sigmas[index] * eps) / alphas[index]

    return DiffusionPath(alphas, sigmas, predict)


def _deviation(place: Tensor, c: _Coefficients) -> Tensor:
    high = (place + 1.0) / 2.0
    return torch.exp(0.5 * (high * c.log_variance_high + (1.0 - high) * c.log_variance_low))
