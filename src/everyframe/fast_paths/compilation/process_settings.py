"""Settings of this process that compiled code depends on besides its block: threads, attention."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch

from everyframe.fast_paths.compilation.block_state import NotCompilableError
from everyframe.ops.attention import Kernels


def read_settings() -> tuple[Any, ...]:
    """Plain data, part of the key of a call.

    Raises:
        NotCompilableError: torch's attention is not its own, as some set theirs in its place.
    """
    attention = torch.nn.functional.scaled_dot_product_attention
    if not isinstance(attention, types.BuiltinFunctionType):
        raise NotCompilableError("torch's attention function is replaced")
    kernels = Kernels.now()
    # diffusers' choice for the whole process; the same where nothing has imported diffusers yet.
    diffusers = sys.modules.get("diffusers.models.attention_dispatch")
    choice = getattr(diffusers, "_AttentionBackendRegistry", None)
    backend = choice and choice._active_backend.value
    return (
        torch.get_num_threads(), torch.get_float32_matmul_precision(), kernels.allowed,
        kernels.order, backend or os.environ.get("DIFFUSERS_ATTN_BACKEND", "native"),
    )  # fmt: skip
