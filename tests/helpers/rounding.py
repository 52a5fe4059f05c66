"""How far float32's rounding moves a result: what a bound follows from, on any CPU.

Instruction sets add the same products in another order, so their sums differ in the last bits. That
is imitated where it arises: each layer's output is moved at random by half a unit in the last place
of its size, and what comes out is held against what came out before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

#: Half a unit in the last place of 1 in float32: the largest error of one rounding.
HALF_A_UNIT = 2.0**-24


def moved_by_rounding(
    call: Callable[[], np.ndarray[Any, Any]], modules: Iterable[nn.Module], *, times: int = 3
) -> float:
    """The largest difference of what `call` gives while these modules round otherwise.

    Two ways of computing that both round differ by the root of 2 as much.
    """
    before, generator = call(), torch.Generator().manual_seed(0)

    def move(module: nn.Module, given: Any, made: Any) -> Any:
        if not isinstance(made, torch.Tensor) or made.dtype != torch.float32:
            return made
        size = HALF_A_UNIT * made.square().mean().sqrt()
        return made + size * torch.randn(made.shape, generator=generator)

    handles = [
        leaf.register_forward_hook(move)
        for module in modules
        for leaf in module.modules()
        if not any(True for _ in leaf.children())
    ]
    try:
        return max(float(np.abs(call() - before).max()) for _ in range(times))
    finally:
        for handle in handles:
            handle.remove()
