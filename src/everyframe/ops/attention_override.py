"""Override torch's attention function in one thread, for the time of a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Parameters of torch's attention, which `inspect.signature` can't read.
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale",
               "enable_gqa")  # fmt: skip


class AttentionOverride(TorchFunctionMode):
    """Context: `answer` computes torch's attention; its first argument is the original function.

    Attributes:
        num_times: number of calls.
    """

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self._answer = answer
        self.num_times = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_times += 1
        given = dict(zip(_PARAMETERS, args, strict=False)) | (kwargs or {})
        q, k, v = (given.pop(name) for name in _PARAMETERS[:3])
        return self._answer(func, q, k, v, **given)
