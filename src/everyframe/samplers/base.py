"""What every sampler speaks in: a step's result, and the callables that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from everyframe.core.errors import InputError

Denoise: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``denoise(x, t)``: state (B, C, ...) and timestep (B,) to the model's guided answer."""

MaskedDenoise: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``denoise(x, t, x_mask)``: the same, told which frames (B, T) are being denoised (true) and
which are given (false)."""

Noise: TypeAlias = Callable[[int], Tensor]
"""``noise(step)``: the unit-variance noise of one step, shaped like x; the same at every call."""


@dataclass(frozen=True, eq=False)
class Step:
    """The state after one step.

    `index` counts up from 0; `t` (B,) is the timestep that the denoiser was called with; `x` is
    what the next step begins with, and after the last step the sample. `memory` is what else the
    next step depends on, for samplers that look back. To go on from a saved step, pass its `x`, its
    `memory` where there is one, and ``start=index + 1``.
    """

    index: int
    num_steps: int
    t: Tensor
    x: Tensor
    memory: Any = None


def as_state(x: Tensor) -> Tensor:
    """`x` in float32 at least: sums over many steps are not kept in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_start(start: int, num_steps: int) -> None:
    """Raises `InputError` unless a run of `num_steps` can go on from step `start`."""
    if not 0 <= start <= num_steps:
        raise InputError(f"start must be 0 to {num_steps} for {num_steps} steps, got {start}")
