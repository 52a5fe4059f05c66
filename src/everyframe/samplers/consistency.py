"""Consistency sampling on Karras' sigmas in one to eight steps, for AnimateLCM-SVD.

Each step predicts the clean sample from the v-prediction of `euler_karras`, and adds new noise of
the next level; the last step adds none. Song et al. 2023 (arXiv 2303.01469), algorithm 1; Wang et
al. 2024, AnimateLCM (arXiv 2402.00769). The levels are those of G-U-N/AnimateLCM,
animatelcm_svd/animatelcm_scheduler.py: every n-th of the 40 that it was distilled on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, Noise, Step, as_state, check_start
from everyframe.samplers.euler_karras import RHO, predict_clean

#: Levels of the distillation.
NUM_LEVELS = 40


def schedule(num_steps: int, sigma_min: float, sigma_max: float) -> Tensor:
    """Sigmas (num_steps + 1,) from `sigma_max` down, then 0; float64, on the CPU."""
    if not 1 <= num_steps <= NUM_LEVELS:
        raise InputError(f"a consistency model takes 1 to {NUM_LEVELS} steps, got {num_steps}")
    places = torch.arange(num_steps, dtype=torch.float64, device="cpu") * (NUM_LEVELS // num_steps)
    low, high = sigma_min ** (1 / RHO), sigma_max ** (1 / RHO)
    sigmas = (high + places / (NUM_LEVELS - 1) * (low - high)) ** RHO
    return torch.cat([sigmas, torch.zeros(1, dtype=torch.float64, device="cpu")])


def sample(
    denoise: Denoise, x: Tensor, sigmas: Tensor, noise: Noise, *, start: int = 0
) -> Iterator[Step]:
    """Steps from x (B, ...) at ``sigmas[start]`` along `sigmas` (see `schedule`).

    ``noise(step)`` is not called for the last step.
    """
    num_steps = len(sigmas) - 1
    check_start(start, num_steps)
    x = as_state(x)
    levels = sigmas.to("cpu", x.dtype)

    def clean() -> Tensor:
        return x0

    for index in range(start, num_steps):
        sigma, following = levels[index], levels[index + 1]
        t, x0 = predict_clean(denoise, x, sigma)
        is_last = index + 1 == num_steps
        x = x0 if is_last else x0 + noise(index).to(x.device, x.dtype) * following
        yield Step(index, num_steps, t, x, clean=clean)
