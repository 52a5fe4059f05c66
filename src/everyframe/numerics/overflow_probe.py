"""Detect float16 overflow inside a call, even where the result is finite again.

Later operations can turn infinity into a finite value: ``tanh`` gives 1, a norm gives 0. The result
is then wrong, and looks right. The probe checks the result of every operation with one asynchronous
reduction; results stay bit-identical. `fault_locator.py` finds the operation, and
`everyframe.runtime.repair.repair_search` decides whether it matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from everyframe.numerics.fault_recorder import has_own_memory
from everyframe.numerics.tensor_stats import iter_tensors


class OverflowProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records float16 results; query `has_seen` afterwards."""

    #: Torch asks each mode this for operators such as flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: compiled code runs as without the probe; flex_attention compiles itself."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ends: list[Tensor] = []

    def has_seen(self) -> bool:
        """Whether any result was not finite. Synchronises with the device once."""
        if not self._ends:
            return False
        device = self._ends[0].device
        ends = torch.stack([each.to(device) for each in self._ends])
        return not bool(ends.isfinite().all())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        # A view is of something that was seen before.
        if not getattr(func, "is_view", False) or has_own_memory(args, answer):
            made = (each for each in iter_tensors(answer) if each.dtype == torch.float16)
            self._ends += [torch.stack(torch.aminmax(each.detach())) for each in made]
        return answer


def may_overflow(module: nn.Module) -> bool:
    """Whether the module computes in float16 and is not compiled (a graph hides its operations)."""
    is_compiled = any(each._compiled_call_impl is not None for each in module.modules())
    return not is_compiled and any(each.dtype == torch.float16 for each in module.parameters())
