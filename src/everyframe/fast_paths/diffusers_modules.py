"""Subclasses of diffusers' modules that compute by our kernels; see `cpu_modules`.

Imported only for a model that has such modules, as diffusers takes a while.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GEGLU
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from torch import Tensor

from everyframe.ops.native import kernels


class NativeGEGLU(GEGLU):  # type: ignore[misc]
    """diffusers' projection with a gated GELU after it."""

    is_plain = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = self.proj(hidden_states)
        if not self.is_plain and kernels.takes(x):
            return kernels.geglu(x)
        value, gate = x.chunk(2, dim=-1)
        plain: Tensor = value * self.gelu(gate)
        return plain


class NativeFP32LayerNorm(FP32LayerNorm):  # type: ignore[misc]
    """diffusers' layer norm with statistics in float32."""

    is_plain = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_plain or len(self.normalized_shape) > 1 or not kernels.takes(inputs):
            plain: Tensor = super().forward(inputs)
            return plain
        return kernels.layer_norm(inputs, self.weight, self.bias, self.eps)


class NativeDiffusersRMSNorm(RMSNorm):  # type: ignore[misc]
    """diffusers' RMS norm; without a weight, or with one of another dtype, it computes itself."""

    is_plain = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        suits = weight is not None and weight.ndim == 1 and weight.dtype == hidden_states.dtype
        if self.is_plain or not suits or not kernels.takes(hidden_states):
            plain: Tensor = super().forward(hidden_states)
            return plain
        return kernels.layer_norm(hidden_states, weight, self.bias, self.eps, is_rms=True)
