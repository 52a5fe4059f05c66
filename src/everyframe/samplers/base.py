"""Common types of all samplers: the step result and the denoiser and noise callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from everyframe.core.errors import InputError

Denoise: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``denoise(x, t)``: state (B, C, ...) and timestep (B,) to the guided prediction of the model."""

MaskedDenoise: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``denoise(x, t, x_mask)``: the same with a mask (B, T), True for frames that are denoised and
False for conditioning frames.
"""

Noise: TypeAlias = Callable[[int], Tensor]
"""``noise(step)``: unit-variance noise of one step, shaped like x; the same at every call."""


@dataclass(frozen=True, eq=False)
class Step:
    """State after one sampling step. To resume, pass its `x`, its `memory` and ``start=index + 1``.

    Attributes:
        index: counts from 0.
        t: timestep that the denoiser was called with, (B,).
        x: input of the next step; after the last step, the sample.
        memory: further state of samplers that use earlier steps, else None.
        note: message for a person about this step, else None.
        clean: gives the predicted clean sample, like x; to be called before the next step is
            requested, since it reads the sampler's own state and keeps nothing in memory.
    """

    index: int
    num_steps: int
    t: Tensor
    x: Tensor
    memory: Any = None
    note: str | None = None
    clean: Callable[[], Tensor] | None = field(default=None, repr=False)


def as_state(x: Tensor) -> Tensor:
    """`x` in float32 at least: sums over many steps need more than half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_start(start: int, num_steps: int) -> None:
    """Raise `InputError` unless a run of `num_steps` steps can resume at step `start`."""
    if not 0 <= start <= num_steps:
        raise InputError(f"start must be 0 to {num_steps} for {num_steps} steps, got {start}")
