"""Subclasses of diffusers' modules that compute by our kernels; see `cpu_modules`.

Imported only for a model that has such modules, as diffusers takes a while.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GEGLU
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
