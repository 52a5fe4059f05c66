"""Call of a sharded denoiser on one rank: its output, the bytes that it sent, its operations.

It runs in float64, so a wrong split can't hide behind rounding. `rank_pool.py` has the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from everyframe.ops.attention import PLAIN, by_kernel
from everyframe.parallel.communicator import Communicator
from everyframe.runtime.model_sharding import ModelPatch

#: Sums in another order differ by 1e-14 or so in float64, whatever is wrong by far more.
RELATIVE = 1e-12


def answered(
    group: Communicator,
    patch: ModelPatch,
    undo: Callable[[], None] | None,
    call: Callable[[], Tensor],
    *,
    count: bool,
) -> dict[str, Any]:
    """A rank's answer, the bytes that left it and, with `count`, its operations.

    The patch is removed, and a planted fault undone.
    """
    counter = FlopCounterMode(display=False)
    try:
        with ExitStack() as counting:
            if count:
                # torch counts no operations of its fused kernel for CPUs.
                counting.enter_context(by_kernel(PLAIN))
                counting.enter_context(counter)
            out = call()
    finally:
        patch.remove()
        if undo is not None:
            undo()
    return {"out": out, "sent": dict(group.sent), "operations": counter.get_total_flops()}


def worst(found: Sequence[dict[str, Any]], wanted: Tensor) -> float:
    """The largest error of any rank, relative to the largest value."""
    return max(float((each["out"] - wanted).abs().max() / wanted.abs().max()) for each in found)
