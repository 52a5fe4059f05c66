"""Tensor placeholder that is materialised on first use, even of its shape.

A pipeline calls its denoiser for one guidance branch, then for the other, and combines both
results. If another rank computes the first branch, its result is not needed before that. The
placeholder lets both calls be issued first. Any operation on it fetches the real tensor, so a
pipeline that reads the first result early is still correct, only slower. `cfg_parallel.py` creates
placeholders; `cfg_detection.py` uses them to detect when a pipeline reads a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(Tensor):
    """Placeholder for the tensor that `known` returns.

    Its own storage is one NaN, in case code bypasses ``__torch_function__``. Reading the shape
    materialises it too, as the shape is not known before.
    """

    known: Callable[[], Tensor]

    @staticmethod
    def of(known: Callable[[], Tensor]) -> LazyTensor:
        """A placeholder; `known` is called at each use."""
        with torch._C.DisableTorchFunction():
            made: LazyTensor = _HELD.as_subclass(LazyTensor)
        made.known = known
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyTensor, lambda each: each.known(), (args, kwargs or {}))
        return func(*args, **kwargs)


_HELD = torch.full((), float("nan"))
