"""How numbers are widened where rounding would show: never below float32, never narrowed.

Used for timesteps, angles, positions, modulation tables and the residual stream. Which parameters
are stored in which precision is not decided here, but from outside the models.
"""

from __future__ import annotations

import torch
from torch import Tensor


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower and for integers."""
    return torch.promote_types(dtype, torch.float32)


def upcast_to_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is when it is float32 or float64 already (no copy then)."""
    return x.to(float32_or_wider(x.dtype))
