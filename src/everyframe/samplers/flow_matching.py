"""Flow matching from noise at 0 to data at 1 by Euler steps, as Step-Video samples.

The state at sigma is ``sigma data + (1 - sigma) noise`` and the model predicts its slope,
``data - noise``. The time shift, which puts more steps at high noise, is Esser et al. 2024
(arXiv 2403.03206), section 5.3.2. `rectified_flow` follows the same path in the other direction,
with timesteps that fall from 1000. Source: stepfun-ai/Step-Video-T2V,
stepvideo/diffusion/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.samplers.base import Denoise, Step, as_state, check_start
from everyframe.samplers.multistep import DiffusionPath
from everyframe.samplers.rectified_flow import transform


def schedule(num_steps: int, shift: float, *, reverse: bool = False) -> Tensor:
    """Sigmas (num_steps + 1,), float64 on the CPU, rising from 0 (noise) to 1 (data).

    A `shift` above 1 puts more steps at high noise. With `reverse` they fall from 1 to 0, for a
    model whose data is at 0. All but the last are timesteps of model calls.
    """
    if num_steps < 1:
        raise InputError(f"a sampler needs 1 step or more, got {num_steps}")
    if not 0 < shift < float("inf"):
        raise InputError(f"the time shift must be above 0, got {shift}")
    grid = torch.linspace(0.0, 1.0, num_steps + 1, dtype=torch.float64, device="cpu")
    if reverse:
        return transform(1 - grid, shift)
    # 1 - transform(1 - u, shift), without the rounding of two numbers near 1.
    return transform(grid, 1 / shift)


def sample(denoise: Denoise, x: Tensor, sigmas: Tensor, *, start: int = 0) -> Iterator[Step]:
    """Sample by Euler steps from noise x (B, ...) along `sigmas` (see `schedule`)."""
    num_steps = len(sigmas) - 1
    check_start(start, num_steps)
    x = as_state(x)
    end = 1 if sigmas[-1] > sigmas[0] else 0

    def clean() -> Tensor:
        # The slope leads from here to the data, which is at the end of the path.
        return x + velocity * (end - float(sigmas[index + 1]))

    for index in range(start, num_steps):
        # Cast before moving: not every device has float64.
        t = sigmas[index].expand(x.shape[0]).to(x.dtype).to(x.device)
        velocity = denoise(x, t).to(x.dtype)
        x = x + velocity * (sigmas[index + 1] - sigmas[index]).to(x.dtype).to(x.device)
        yield Step(index, num_steps, t, x, clean=clean)


def path(sigmas: Tensor) -> DiffusionPath:
    """The path of `sample` along `sigmas`, rising or falling, for the solvers of `multistep`."""
    is_rising = bool(sigmas[-1] > sigmas[0])
    ahead = (1 - sigmas if is_rising else -sigmas).tolist()  # from each level to the data
    levels = tuple(map(abs, ahead))

    def predict(denoise: Denoise, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        t = sigmas[index].expand(x.shape[0]).to(x.dtype).to(x.device)
        return t, x + denoise(x, t).to(x.dtype) * ahead[index]

    alphas = tuple((sigmas if is_rising else 1 - sigmas).tolist())
    return DiffusionPath(alphas, levels, predict, is_flow=True)
