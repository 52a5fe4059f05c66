"""Normalisation over the last dimension, with statistics in float32 at least.

PyTorch's kernels of `layer_norm` and `rms_norm` guarantee this for half precision; a formula such
as ``x.pow(2).mean()`` overflows float16 above 256. `WideGroupNorm` and `WideLayerNorm` replace
PyTorch's norms in foreign modules whose norms are float32 islands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.ops.device import device_type
from everyframe.ops.dtypes import upcast_to_float32


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the last dimension, in the dtype of `x`."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of `x`."""
    if device_type(x) == "cuda":
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)
    # Elsewhere PyTorch's is this formula in twice as many passes over memory. The norm is taken
    # over float32 numbers whatever `x` holds, so squares of large float16 numbers don't overflow.
    wide = upcast_to_float32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.rsqrt(norm.square() / x.shape[-1] + eps)
    return (wide * inverse).mul_(weight).to(x.dtype)


class LayerNorm(nn.Module):
    """`layer_norm` as a module without parameters; the modulation after it scales and shifts."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.eps)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned ``weight`` of shape (size,)."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


_GroupNorm = TypeVar("_GroupNorm", bound="WideGroupNorm")

Statistics = Callable[[Tensor, int], tuple[Tensor, Tensor] | None]
"""``statistics(x, num_groups)``: mean and variance of channel groups, for an x (B, C, ...) that is
a shard of a sample. They broadcast to x with groups in place of channels. None: x is the whole.
"""


class WideGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` with float32 parameters for input of any dtype; the output has that dtype.

    Parameter names are unchanged. The input is upcast in memory only where the kernel needs it.
    A rank with a shard of a sample passes `statistics` of the whole.
    """

    takes_any_dtype = True

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        found = statistics(x, self.num_groups) if statistics is not None else None
        if found is not None:
            return self._by(x, *found)

        def norm(x: Tensor) -> Tensor:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

        return _in_its_dtype(norm, x, self.weight)

    def _by(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalise with one scale and one shift a channel, in the dtype of the statistics."""
        size = self.num_channels // self.num_groups
        per_channel = (-1, *[1] * (x.ndim - 2))
        inverse = torch.rsqrt(variance + self.eps).repeat_interleave(size, dim=1)
        scale = inverse * self.weight.view(per_channel)
        shift = self.bias.view(per_channel) - mean.repeat_interleave(size, dim=1) * scale
        wide = upcast_to_float32(x)
        return torch.addcmul(shift.to(wide.dtype), wide, scale.to(wide.dtype)).to(x.dtype)


class GroupNormSiLU(WideGroupNorm):
    """`WideGroupNorm`, then SiLU."""

    @classmethod
    def of(cls, norm: nn.GroupNorm) -> GroupNormSiLU:
        """`norm` with SiLU after it; the parameters remain the same objects."""
        return _with_parameters_of(norm, cls)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        return F.silu(super().forward(x, statistics), inplace=True)


class WideLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with float32 parameters for input of any dtype; the output has that dtype."""

    takes_any_dtype = True

    def forward(self, x: Tensor) -> Tensor:
        def norm(x: Tensor) -> Tensor:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

        return _in_its_dtype(norm, x, self.weight)


def _in_its_dtype(norm: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    # The CPU's kernels read narrow numbers and float32 parameters together; others want one dtype.
    if x.dtype == weight.dtype or (device_type(x) == "cpu" and x.dtype.itemsize < 4):
        return norm(x)
    return norm(x.to(weight.dtype)).to(x.dtype)


def widen_norms(module: nn.Module) -> None:
    """Replace norms with weights inside `module` by `WideGroupNorm` and `WideLayerNorm`.

    The parameters remain the same objects.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.GroupNorm and child.affine:
                setattr(parent, name, _with_parameters_of(child, WideGroupNorm))
            elif type(child) is nn.LayerNorm and child.elementwise_affine:
                setattr(parent, name, _wide_layer_norm(child))


# Built without parameters first: there are hundreds of norms, and initialisation takes time.


def _with_parameters_of(norm: nn.GroupNorm, kind: type[_GroupNorm]) -> _GroupNorm:
    made = kind(norm.num_groups, norm.num_channels, norm.eps, affine=False)
    made.affine, made.weight, made.bias = True, norm.weight, norm.bias
    return made


def _wide_layer_norm(norm: nn.LayerNorm) -> WideLayerNorm:
    wide = WideLayerNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)
    wide.elementwise_affine, wide.weight, wide.bias = True, norm.weight, norm.bias
    return wide
