"""Whether a call made infinities in float16, also where they came to nothing later.

What an operation after it makes of an infinity may be finite: ``tanh`` gives 1, a norm gives 0. The
result is wrong then, and no look at it tells. So each operation's own result is looked at, by one
reduction that the device is not waited for; what is computed stays the same to the bit. Not here:
which operation it was (`fault_locator.py`), and whether it matters
(`everyframe.runtime.repair_search`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from everyframe.numerics.tensor_stats import iter_tensors


class OverflowProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks while it is entered; `has_seen` afterwards."""

    #: Such as flex_attention, of which torch asks each mode.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What is compiled runs as it does without; flex_attention compiles itself."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ends: list[Tensor] = []

    def has_seen(self) -> bool:
        """Whether anything was not finite; the device is waited for once."""
        if not self._ends:
            return False
        device = self._ends[0].device
        ends = torch.stack([each.to(device) for each in self._ends])
        return not bool(ends.isfinite().all())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):  # of something that was seen before
            made = (each for each in iter_tensors(answer) if each.dtype == torch.float16)
            self._ends += [torch.stack(torch.aminmax(each.detach())) for each in made]
        return answer


def may_overflow(module: nn.Module) -> bool:
    """Whether it computes in float16, by operations that can be seen: what is compiled has none."""
    is_compiled = any(each._compiled_call_impl is not None for each in module.modules())
    return not is_compiled and any(each.dtype == torch.float16 for each in module.parameters())
