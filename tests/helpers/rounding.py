"""Effect of float32 rounding on a result, from which tests derive a bound that holds on any CPU.

Instruction sets add the same products in different orders, so sums differ in the last bits. This is
simulated: each layer's output is perturbed at random by half a unit in the last place of its root
mean square, and the final result is compared with the unperturbed one.
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
    """Largest change of the result of `call` under simulated rounding in these modules.

    Two computations that both round differ by sqrt(2) times as much.
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
