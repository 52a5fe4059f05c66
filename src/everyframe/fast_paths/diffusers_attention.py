"""diffusers' attention modules with torch's attention inside them computed by our kernel in C.

There are dozens of such classes, and the processors inside them call torch's
`scaled_dot_product_attention` after norms, rotations and reshapes of their own. So a class is
recognised by its base, and that one call is answered while its `forward` runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.ops.native import kernels

#: Bases of diffusers' attention modules.
_BASES = frozenset({
    "diffusers.models.attention_processor.Attention",
    "diffusers.models.attention.AttentionModuleMixin",
})  # fmt: skip

#: Parameters of torch's function, in order.
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def is_attention(module: nn.Module) -> bool:
    """Whether it is an attention module of diffusers, with torch's kernels still."""
    own = type(module)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in own.__mro__}
    return own.__module__.startswith("diffusers.") and not _BASES.isdisjoint(names)


@functools.cache
def native_kind(own: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an attention class whose attention is computed in C where that suits."""
    plain: Callable[..., Any] = own.forward

    @functools.wraps(plain)  # others read the names of its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if self.is_plain or not tensors or not kernels.takes(tensors[0]):
            return plain(self, *args, **kwargs)
        with _NativeAttention():
            return plain(self, *args, **kwargs)

    made = {"__module__": __name__, "is_plain": False, "forward": forward}
    return type(f"Native{own.__name__}", (own,), made)


class _NativeAttention(TorchFunctionMode):
    """Function mode: our kernel computes unmasked attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(_PARAMETERS, args, strict=False)) | (kwargs or {})
        q, k, v = (given.pop(name) for name in _PARAMETERS[:3])
        scale = given.pop("scale", None)
        is_plain = given.pop("attn_mask", None) is None and not any(given.values())
        # Whoever asked before us goes first: ranks exchange tokens, a dry run only counts.
        is_ours = is_plain and not torch._C._len_torch_function_stack()
        if is_ours and q.ndim == 4 and kernels.attends(q, k, v):
            return kernels.attention(q, k, v, scale or q.shape[-1] ** -0.5).transpose(1, 2)
        return func(*args, **(kwargs or {}))
