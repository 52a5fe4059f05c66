"""Modulation and gates of a residual stream, and rotary embedding, by kernels in C on a CPU.

See `cpu_modules` for the others, and for what all of them have in common.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.ops.native import kernels
from everyframe.ops.rope import AxesTable, RotaryTable, Rotate, RotateAxes


class NativeGatedAdd(GatedAdd):
    """A branch times its gate, added to the stream in one pass, with one rounding."""

    is_plain = False

    def forward(self, x_BTSC: Tensor, branch_BTSC: Tensor, gate_BF1C: Tensor) -> Tensor:
        widest = torch.promote_types(branch_BTSC.dtype, gate_BF1C.dtype)
        suits = (
            torch.promote_types(x_BTSC.dtype, widest) == x_BTSC.dtype
            and branch_BTSC.shape == x_BTSC.shape
            and _is_row_table(gate_BF1C, x_BTSC)
        )
        if self.is_plain or not suits or not kernels.supports(x_BTSC, branch_BTSC):
            return super().forward(x_BTSC, branch_BTSC, gate_BF1C)
        return kernels.gated_add(x_BTSC, branch_BTSC, gate_BF1C)


class NativeModulate(Modulate):
    """The scale and shift after a norm in one pass, as wide as torch's result."""

    is_plain = False

    def forward(self, x_BTSC: Tensor, shift_BF1C: Tensor, scale_BF1C: Tensor) -> Tensor:
        widest = torch.promote_types(shift_BF1C.dtype, scale_BF1C.dtype)
        dtype = torch.promote_types(x_BTSC.dtype, widest)
        suits = (
            dtype in (torch.float32, x_BTSC.dtype)
            and shift_BF1C.shape == scale_BF1C.shape
            and _is_row_table(scale_BF1C, x_BTSC)
        )
        if self.is_plain or not suits or not kernels.supports(x_BTSC):
            return super().forward(x_BTSC, shift_BF1C, scale_BF1C)
        return kernels.modulate(x_BTSC, shift_BF1C, scale_BF1C, dtype)


def _is_row_table(table: Tensor, x: Tensor) -> bool:
    """Whether each row of the table is for so many rows of x in order: sizes of x, then ones."""
    sizes, own = x.shape[:-1], table.shape[:-1]
    if len(own) != len(sizes) or table.shape[-1] != x.shape[-1]:
        return False
    equal = next((i for i, size in enumerate(own) if size != sizes[i]), len(own))
    return all(size == 1 for size in own[equal:])


class NativeRotate(Rotate):
    """RoPE of neighbouring channels in one pass, with one rounding."""

    is_plain = False

    def forward(self, x: Tensor, table: RotaryTable) -> Tensor:
        if self.is_plain or not _can_rotate(x, table.cos):
            return super().forward(x, table)
        return kernels.rotate(x, table.cos, table.sin)


class NativeRotateAxes(RotateAxes):
    """RoPE of halves of channels, on several axes, in one pass with one rounding."""

    is_plain = False

    def forward(self, x: Tensor, table: AxesTable) -> Tensor:
        if self.is_plain or not _can_rotate(x, table.cos):
            return super().forward(x, table)
        return kernels.rotate(x, table.cos, table.sin, table.widths)


def _can_rotate(x: Tensor, cos_ND: Tensor) -> bool:
    is_table = cos_ND.dtype == torch.float32 and cos_ND.shape[:-1] == x.shape[-2:-1]
    return is_table and kernels.supports(x)
