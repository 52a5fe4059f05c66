"""Normalisation over the last dimension with statistics in float32 at least.

PyTorch's own kernels for `layer_norm` and `rms_norm` hold that promise for half precisions; a
formula written out, such as ``x.pow(2).mean()``, overflows float16 above 256. Not here: group
norms of the autoencoders, which come with diffusers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.ops.dtypes import at_least_float32


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the last dimension, in the dtype of `x`."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of `x`."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)
    # Elsewhere PyTorch's is this formula in twice as many passes over memory. The norm is taken
    # over float32 numbers whatever `x` holds, so squares of large float16 numbers don't overflow.
    wide = at_least_float32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.rsqrt(norm.square() / x.shape[-1] + eps)
    return (wide * inverse).mul_(weight).to(x.dtype)


class LayerNorm(nn.Module):
    """`layer_norm` as a module; it has no parameters, the modulation after it scales and shifts."""

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
