"""Rotary position embedding (RoPE) on interleaved pairs: channels 2i and 2i+1 rotate together.

Angles are large and their last digits matter. So tables are computed in float64 and stored in
float32 at least, rotation runs in that precision, and the result is cast at the end.
Source: Su et al., "RoFormer" (arXiv 2104.09864). Additive position embeddings are in
`everyframe.ops.embeddings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everyframe.ops.device import device_type
from everyframe.ops.dtypes import float32_or_wider


class RotaryTable(NamedTuple):
    """Cosines and sines of a rotation; both (N, D), in float32 or float64.

    ``cos`` holds the cosine of each pair's angle twice, ``sin`` its sine as (-sin, +sin): a pair
    (a, b) becomes (a cos - b sin, b cos + a sin).
    """

    cos: Tensor
    sin: Tensor


def rotary_table(
    positions: Tensor | int,
    dim: int,
    *,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> RotaryTable:
    """Table for `positions` (N,), or for 0..N-1 given as a number; pair i turns by p theta^(-2i/D).

    A `dtype` below float32 becomes float32. Computed on the CPU, as some devices have no float64.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    pairs = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.outer(positions.cpu().to(torch.float64), theta**-pairs)
    sine = angles.sin()
    cos, sin = angles.cos().repeat_interleave(2, dim=-1), torch.stack((-sine, sine), -1).flatten(-2)
    dtype = float32_or_wider(dtype)
    # Cast before moving: not every device has float64.
    return RotaryTable(cos.to(dtype).to(device), sin.to(dtype).to(device))


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate `x` (..., N, D) by the table; computed in the table's dtype, returned in `x`'s."""
    wide = x.to(torch.promote_types(x.dtype, table.cos.dtype))
    if device_type(wide) == "cpu":
        # One pass over memory where the formula below takes three. Elsewhere complex numbers are
        # not always there (MPS) or not compiled (inductor).
        turns = torch.complex(table.cos[..., ::2], table.sin[..., 1::2])
        pairs = torch.view_as_complex(torch.unflatten(wide, -1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    swapped = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * table.cos, swapped, table.sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Compute the `RotaryTable` that the blocks of a forward pass share. No parameters."""

    def __init__(self, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        return rotary_table(length, self.dim, theta=self.theta, dtype=dtype, device=device)


class Rotate(nn.Module):
    """`rotate` as a child module of an attention."""

    def forward(self, x: Tensor, table: RotaryTable) -> Tensor:
        return rotate(x, table)


class AxesTable(NamedTuple):
    """Cosines and sines of each token's angles on several axes, (N, D/2) each, axis after axis.

    ``widths`` are the channels of each axis.
    """

    cos: Tensor
    sin: Tensor
    widths: tuple[int, ...]


def axis_angles(positions_N: Tensor, width: int, theta: float) -> Tensor:
    """Angles ``p theta^(-2k / width)``, (N, width / 2), float64 on the CPU."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return torch.outer(positions_N.to("cpu", torch.float64), theta**-exponents)


def axes_table(
    sizes: Sequence[int],
    widths: Sequence[int],
    *,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> AxesTable:
    """Table of a whole grid; a `dtype` below float32 becomes float32."""
    dtype = float32_or_wider(dtype)
    cosines: list[Tensor] = []
    sines: list[Tensor] = []
    for axis, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        # Few angles are distinct: the grid repeats them.
        angles = axis_angles(torch.arange(size, device="cpu"), width, theta)
        shape = [1] * len(sizes) + [width // 2]
        shape[axis] = size
        for parts, values in ((cosines, angles.cos()), (sines, angles.sin())):
            # Cast first: a device without float64 can't be handed any.
            axis_values = values.to(dtype).to(device).reshape(shape)
            parts.append(axis_values.expand(*sizes, -1).flatten(0, -2))
    return AxesTable(torch.cat(cosines, -1), torch.cat(sines, -1), tuple(widths))


def rotate_axes(x: Tensor, table: AxesTable) -> Tensor:
    """Rotate `x` (..., N, D) by the table; computed in the table's dtype, returned in `x`'s."""
    wide = torch.promote_types(x.dtype, table.cos.dtype)
    halves = [width // 2 for width in table.widths]
    turned = []
    # One axis at a time, as the widened tensor is the largest.
    for part, cos, sin in zip(
        torch.split(x, list(table.widths), -1),
        torch.split(table.cos, halves, -1),
        torch.split(table.sin, halves, -1),
        strict=True,
    ):
        first, second = part.to(wide).chunk(2, dim=-1)
        turned.append((first * cos).addcmul_(second, sin, value=-1).to(x.dtype))
        turned.append((second * cos).addcmul_(first, sin).to(x.dtype))
    return torch.cat(turned, dim=-1)


class RotaryAxes(nn.Module):
    """Compute the `AxesTable` that the blocks of a forward pass share. No parameters."""

    def __init__(self, widths: Sequence[int], theta: float = 10000.0) -> None:
        super().__init__()
        self.widths, self.theta = tuple(widths), theta

    def forward(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> AxesTable:
        return axes_table(sizes, self.widths, theta=self.theta, dtype=dtype, device=device)


class RotateAxes(nn.Module):
    """`rotate_axes` as a child module of an attention."""

    def forward(self, x: Tensor, table: AxesTable) -> Tensor:
        return rotate_axes(x, table)
