"""Activations as modules without parameters, so that a fast path can replace them from outside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedActivation(nn.Identity):
    """Stands for an activation that the module before it computes, which has `fuses_next`.

    What lies between the two is no more what it was: a trace leaves it out.
    """

    is_fused = True


class GatedGELU(nn.Module):
    """``value * gelu(gate)`` (..., C) of x (..., 2 C), which holds the values, then the gates."""

    def forward(self, x: Tensor) -> Tensor:
        return gated_gelu(x)


def gated_gelu(x: Tensor) -> Tensor:
    """As `GatedGELU`, which a fast path can replace."""
    value, gate = torch.chunk(x, 2, dim=-1)
    return F.gelu(gate).mul_(value)
