"""Convolutions over time, as a class that a fast path can replace from outside."""

from __future__ import annotations

from torch import Tensor, nn


class TemporalConv(nn.Conv3d):
    """Convolution over time only, that accepts input without pixels.

    The plain kernels reject empty input. A rank without pixels calls it like every other rank and
    gets its input back.
    """

    def forward(self, x_bCThw: Tensor) -> Tensor:
        return x_bCThw if 0 in x_bCThw.shape else super().forward(x_bCThw)
