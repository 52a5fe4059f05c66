"""Fused linear layer and gated GELU: one kernel in C, whose intermediate result stays in registers.

A module names both in its class: ``gated_linear = (name of the linear layer, name of the GELU)``.
The linear layer computes all, so that its hooks and its weight's name stay.
"""

from __future__ import annotations

from torch import Tensor, nn

from everyframe.fast_paths.modules.cpu_modules import NativeGatedGELU, OneDNNLinear
from everyframe.ops.activation import FusedActivation, GatedGELU, gated_gelu
from everyframe.ops.module_class import recast
from everyframe.ops.native import kernels


class NativeGatedLinear(OneDNNLinear):
    """``value * gelu(gate)`` (..., C) of a linear layer's result (..., 2 C).

    Where the kernel does not suit, the layer computes by oneDNN or plainly, and the GELU after it.
    """

    fuses_next = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain or not kernels.supports_products(x, self.weight):
            return gated_gelu(super().forward(x))
        return kernels.gated_linear(x, self.weight, self.bias)


def places(module: nn.Module) -> tuple[str, ...]:
    """Names of the submodules whose linear layer and gated GELU can be fused."""
    return tuple(name for name, part in module.named_modules() if name and _can_fuse(part))


def _names(part: nn.Module) -> tuple[str, str] | None:
    """Names of the linear layer and the GELU after it."""
    return getattr(type(part), "gated_linear", None)


def _can_fuse(part: nn.Module) -> bool:
    names = _names(part)
    if names is None:
        return False
    linear, activation = map(part.get_submodule, names)
    kinds = type(linear), type(activation)
    return kinds[0] in (nn.Linear, OneDNNLinear) and kinds[1] in (GatedGELU, NativeGatedGELU)


def fuse(module: nn.Module, blocks: tuple[str, ...]) -> None:
    """Fuse all `places`, inside of blocks and outside."""
    for name in places(module):
        part = module.get_submodule(name)
        names = _names(part)
        assert names is not None
        linear, activation = names
        recast(part, linear, NativeGatedLinear)
        setattr(part, activation, FusedActivation())
