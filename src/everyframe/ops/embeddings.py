"""Sinusoidal embeddings of timesteps, positions and other numbers, and projections of patches.

They are computed in float32 at least, whatever the dtype of the parameters: one rounded number here
affects every block, and bfloat16 turns timestep 999.4 into 1000. The learned layers after them are
in the models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.ops.dtypes import float32_or_wider, upcast_to_float32

#: Longest wavelength over 2 pi, as in every transformer since Vaswani et al., arXiv 1706.03762.
_MAX_PERIOD = 10000.0


def timestep_embedding(t_B: Tensor, dim: int) -> Tensor:
    """Embed (B,) numbers as (B, dim): ``[cos(t f) | sin(t f)]``, f from 1 down to 1/10000.

    The result is float64 if `t_B` is, else float32. Cosine first is the order of DiT (Peebles and
    Xie, arXiv 2212.09748). `dim` is even.
    """
    t_B = upcast_to_float32(t_B)
    f = torch.tensor(_frequencies(dim // 2, t_B.dtype), device=t_B.device)
    angles = t_B[:, None] * f
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@cache
def _frequencies(num: int, dtype: torch.dtype) -> npt.NDArray[np.floating[Any]]:
    """``10000^(-i / num)``, (num,), from exponents in `dtype`, as upstream computes them.

    Computed on the host with a correctly rounded exponential: devices differ in the last bit, and t
    is up to 1000.
    """
    kind = np.float64 if dtype == torch.float64 else np.float32
    exponents = kind(-math.log(_MAX_PERIOD)) * (np.arange(num, dtype=kind) / kind(num))
    rounded: npt.NDArray[np.floating[Any]] = np.exp(exponents.astype(np.float64)).astype(kind)
    return rounded


class TimestepEmbedding(nn.Module):
    """`timestep_embedding` as a child module. No parameters."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t_B: Tensor) -> Tensor:
        return timestep_embedding(t_B, self.dim)


class PatchProjection(nn.Module):
    """Linear projection of flattened patches (..., in * volume) with a convolution's weight.

    A convolution whose stride equals its kernel is a matrix product. Writing it as one is as fast
    and avoids convolution kernels that are known to be wrong on some cards.
    """

    def __init__(self, in_channels: int, out_channels: int, patch_size: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_channels, in_channels, *patch_size))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


def sincos_1d(
    positions: Sequence[float],
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Embed N positions as (N, dim): ``[sin(p w) | cos(p w)]`` with w_k = 10000^(-2k/dim)."""
    frequencies = _MAX_PERIOD ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.tensor(positions, dtype=torch.float64), frequencies)
    table = torch.cat((angles.sin(), angles.cos()), dim=-1)
    # Cast before moving: not every device has float64.
    return table.to(float32_or_wider(dtype)).to(device)


def sincos_2d(
    rows: Sequence[float],
    columns: Sequence[float],
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """(rows * columns, dim), row by row: half the channels for the *column*, then half for the row.

    PixArt and both Open-Sora versions were trained with the column first.
    """
    of_columns = sincos_1d(columns, dim // 2, dtype=dtype, device=device)
    of_rows = sincos_1d(rows, dim // 2, dtype=dtype, device=device)
    shape = (len(rows), len(columns), dim // 2)
    return torch.cat(
        (of_columns[None].expand(shape), of_rows[:, None].expand(shape)), dim=-1
    ).flatten(0, 1)
