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
from torch import Tensor, nn

from everyframe.ops.attention_override import AttentionOverride
from everyframe.ops.native import kernels

#: Bases of diffusers' attention modules, and video models' modules that have neither of them.
_BASES = frozenset({
    "diffusers.models.attention_processor.Attention",
    "diffusers.models.attention.AttentionModuleMixin",
    "diffusers.models.attention_processor.MochiAttention",
    "diffusers.models.autoencoders.autoencoder_kl_cosmos.CosmosCausalAttention",
    "diffusers.models.autoencoders.autoencoder_kl_wan.WanAttentionBlock",
    "diffusers.models.transformers.transformer_sana_wm.SanaWMSoftmaxAttention",
})  # fmt: skip


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
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if self.is_plain or first is None or not kernels.supports(first):
            return plain(self, *args, **kwargs)
        with AttentionOverride(_attention):
            return plain(self, *args, **kwargs)

    made = {"__module__": __name__, "is_plain": False, "forward": forward}
    return type(f"Native{own.__name__}", (own,), made)


def _attention(
    compute: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    **how: Any,
) -> Tensor:
    """Attention in C where nothing is masked; else by `compute`, which is torch's."""
    scale_or_default = q.shape[-1] ** -0.5 if scale is None else scale
    # Outer function modes come first: ranks exchange tokens, a dry run only counts.
    is_ours = attn_mask is None and not any(how.values()) and scale_or_default > 0
    is_ours = is_ours and not torch._C._len_torch_function_stack()
    if is_ours and q.ndim == 4 and kernels.supports_attention(q, k, v):
        return kernels.attention(q, k, v, scale_or_default).transpose(1, 2)
    return compute(q, k, v, attn_mask, scale=scale, **how)
