"""Upcasts where rounding would show: to float32 at least, never narrower.

Used for timesteps, angles, positions, modulation tables and the residual stream. Storage dtypes of
parameters are chosen from outside the models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.ops.device import device_type

#: Apple's GPUs, Ascend's NPUs, and Intel's GPUs but for those of data centres.
_WITHOUT_FLOAT64 = ("mps", "npu", "xpu")


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower and for integers."""
    return torch.promote_types(dtype, torch.float32)


def upcast_to_float32(x: Tensor) -> Tensor:
    """`x` in float32; unchanged and not copied if it is float32 or float64."""
    return x.to(float32_or_wider(x.dtype))


def upcast_to_widest(x: Tensor) -> Tensor:
    """`x` in float64, or in float32 on a device that may lack it."""
    return x.float() if device_type(x) in _WITHOUT_FLOAT64 else x.double()
