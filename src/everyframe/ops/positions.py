"""Sine and cosine position embeddings that are added to tokens, along one axis or two.

Made in float64 on the CPU (some devices have no float64) and cast at the end, to float32 at least.
Not here: rotary embeddings (`everyframe.ops.rope`), and which numbers a model calls positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everyframe.ops.dtypes import float32_or_wider


def sincos_1d(
    positions: Sequence[float],
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    max_period: float = 10000.0,
) -> Tensor:
    """N positions to (N, dim): ``[sin(p w) | cos(p w)]`` with w_k = max_period^(-2k/dim)."""
    frequencies = max_period ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.tensor(positions, dtype=torch.float64), frequencies)
    table = torch.cat((angles.sin(), angles.cos()), dim=-1)
    # Cast first: a device without float64 can't be handed any.
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

    Columns first is what PixArt and both Open-Sora versions were trained with.
    """
    of_columns = sincos_1d(columns, dim // 2, dtype=dtype, device=device)
    of_rows = sincos_1d(rows, dim // 2, dtype=dtype, device=device)
    shape = (len(rows), len(columns), dim // 2)
    return torch.cat(
        (of_columns[None].expand(shape), of_rows[:, None].expand(shape)), dim=-1
    ).flatten(0, 1)
