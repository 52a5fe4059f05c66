"""A tensor that may not be here yet, and comes when somebody looks at it.

A pipeline asks its denoiser about one branch of guidance, then about the other, and puts both
answers together. Where another rank computes the first, its answer is not needed before that. So
what the pipeline is given is a stand-in: whatever is done with it has the tensor brought first, so
nobody ever sees anything else. Read next: `cfg_parallel.py`, which gives them out;
`cfg_detection.py`, which finds by them when a pipeline looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(Tensor):
    """Stands for what `known` gives; its own storage holds one NaN, should anybody get past that.

    To ask for its shape is to look at it, too: it is not known before.
    """

    known: Callable[[], Tensor]

    @staticmethod
    def of(known: Callable[[], Tensor]) -> LazyTensor:
        """A stand-in for the tensor that `known` gives, each time that it is asked."""
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
