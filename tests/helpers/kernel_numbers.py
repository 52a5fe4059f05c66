"""Random inputs for kernels, and the errors of their results against float64."""

from __future__ import annotations

import torch
from torch import Tensor

#: One rounding of the result (half a unit in the last place); in float32 also what is computed.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) + mean).to(dtype)


def check(got: Tensor, want: Tensor, size: float = 1.0) -> None:
    """`size` is that of the numbers that were summed."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance * size, rtol=tolerance)
