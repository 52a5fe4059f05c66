"""How far a result is from a reference, as two numbers that a person can read.

Not a test by itself: who compares states the budget and why it is what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference, and that divided by the reference's largest magnitude.

    Both are infinite where one side has a value that is not finite and the other hasn't the same.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"absolute {self.absolute:.2e}, relative {self.relative:.2e}"


def largest_error(got: Tensor, want: Tensor) -> Difference:
    """The largest error of `got` against the reference `want`, computed in float64 on the CPU.

    Raises `ValueError` where the shapes differ: nothing is broadcast, since a result of another
    shape is wrong and not close. Two empty tensors differ by 0.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    a, b = (side.detach().cpu().to(torch.float64) for side in (got, want))
    same = (a == b) | (a.isnan() & b.isnan())  # equal infinities and NaNs are no error
    if bool(same.all()):
        return Difference(0.0, 0.0)
    error = torch.where(same, torch.zeros_like(a), (a - b).abs())
    absolute = float(error.max()) if bool(error.isfinite().all()) else math.inf
    size = float(torch.where(b.isfinite(), b, torch.zeros_like(b)).abs().max())
    return Difference(absolute, absolute / size if size > 0 else math.inf)
