"""A linear layer and the GELU after it as one kernel of oneDNN, of the same parameter names.

torch has this kernel for what its compiler makes, as a private operator; so it may be gone in the
next version, and whether it is here, right and faster is asked by a trial each time. On one
processor it halved the time of GELU, on another it took half as long again as the plain way.
Read next: `put_on`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: What the kernel computes in at all.
_DTYPES = (torch.float32, torch.bfloat16)


class LinearGelu(nn.Linear):
    """``gelu(x W^T + b)``; `approximate` is `F.gelu`'s. Without a kernel for it, the plain way.

    A repair that wants plain kernels sets `is_plain`.
    """

    is_plain = False

    def __init__(self, linear: nn.Linear, approximate: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.approximate = approximate
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # Dry runs have no numbers, training has gradients, a repair may widen the weights, and a
        # rank without tokens has nothing to ask.
        kept = x.dtype in _DTYPES and x.dtype == self.weight.dtype and 0 not in x.shape
        if self.is_plain or x.device.type != "cpu" or not kept or torch.is_grad_enabled():
            return F.gelu(F.linear(x, self.weight, self.bias), approximate=self.approximate)
        operators: Any = torch.ops.mkldnn
        fused: Tensor = operators._linear_pointwise(
            x, self.weight, self.bias, "gelu", [], self.approximate
        )
        return fused


def pairs(
    module: nn.Module, inside: Iterable[str]
) -> list[tuple[nn.Module, tuple[str, nn.Linear], tuple[str, nn.GELU]]]:
    """Linear layers with a GELU behind them, by name, and the modules that hold both.

    Only inside of the parts with these dotted names. That one is called after the other is taken
    from their order in the module, so a trial has to show it.
    """
    return [
        (parent, (name, linear), (after, gelu))
        for part in inside
        for parent in module.get_submodule(part).modules()
        for (name, linear), (after, gelu) in pairwise(parent.named_children())
        if type(linear) is nn.Linear and type(gelu) is nn.GELU
    ]


def fuse(module: nn.Module, inside: Iterable[str]) -> None:
    """Swap each of the `pairs` for a `LinearGelu` and for nothing."""
    for parent, (name, linear), (after, gelu) in pairs(module, inside):
        setattr(parent, name, LinearGelu(linear, gelu.approximate))
        setattr(parent, after, nn.Identity())
