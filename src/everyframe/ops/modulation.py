"""Timestep modulation (adaLN): scale and shift after a norm, and a gate on the branch.

A rounding error here scales all tokens alike and does not average out, so the tables are float32 at
least. Source: adaLN-single of PixArt-alpha (arXiv 2310.00426). Each step also exists as a module
without parameters, for hooks and replacement from outside.

Shapes: B batch, F frames or 1 for all of them, K tables, C channels; tokens are (B, T, S, C). For
tokens (B, N, C) in one row per sample there is no F.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyframe.ops.dtypes import upcast_to_float32


def modulation_tables(table_KC: Tensor, t_BFKC: Tensor) -> tuple[Tensor, ...]:
    """The K tables ``table + t``, each (B, F, 1, C) or (B, 1, C), in float32 at least."""
    tables = upcast_to_float32(table_KC) + upcast_to_float32(t_BFKC)
    return tuple(table.unsqueeze(-2) for table in tables.unbind(-2))


def modulate(x_BTSC: Tensor, shift_BF1C: Tensor, scale_BF1C: Tensor) -> Tensor:
    """``x (1 + scale) + shift``, in the widest dtype of the three."""
    return torch.addcmul(shift_BF1C, x_BTSC, 1 + scale_BF1C)


def gated_add(x_BTSC: Tensor, branch_BTSC: Tensor, gate_BF1C: Tensor) -> Tensor:
    """``x + gate * branch``; a float32 residual stream stays float32 under bfloat16 branches."""
    return torch.addcmul(x_BTSC, branch_BTSC, gate_BF1C)


def pick_frames(x_BTSC: Tensor, other_BTSC: Tensor, mask_BT11: Tensor) -> Tensor:
    """`x` in frames where the mask is True, `other` where it is False."""
    return torch.where(mask_BT11, x_BTSC, other_BTSC)


class ModulationTables(nn.Module):
    """`modulation_tables` as a module."""

    def forward(self, table_KC: Tensor, t_BFKC: Tensor) -> tuple[Tensor, ...]:
        return modulation_tables(table_KC, t_BFKC)


class Modulate(nn.Module):
    """`modulate` as a module."""

    def forward(self, x_BTSC: Tensor, shift_BF1C: Tensor, scale_BF1C: Tensor) -> Tensor:
        return modulate(x_BTSC, shift_BF1C, scale_BF1C)


class GatedAdd(nn.Module):
    """`gated_add` as a module."""

    def forward(self, x_BTSC: Tensor, branch_BTSC: Tensor, gate_BF1C: Tensor) -> Tensor:
        return gated_add(x_BTSC, branch_BTSC, gate_BF1C)


class Add(nn.Module):
    """``x + branch`` as a module, for a branch without a gate."""

    def forward(self, x_BTSC: Tensor, branch_BTSC: Tensor) -> Tensor:
        return x_BTSC + branch_BTSC


class SelectByFrame(nn.Module):
    """`pick_frames` as a module."""

    def forward(self, x_BTSC: Tensor, other_BTSC: Tensor, mask_BT11: Tensor) -> Tensor:
        return pick_frames(x_BTSC, other_BTSC, mask_BT11)
