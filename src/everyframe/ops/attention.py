"""Softmax attention: the one place where its kernel is chosen.

PyTorch's `scaled_dot_product_attention` picks the fastest kernel of its own for the device and
never needs anything compiled or installed. Splitting a row over devices and projecting tokens to
queries, keys and values are not done here; see the models in `everyframe.families`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(
    q_BHQD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """``softmax(q k^T scale) v`` as (B, heads, Q, D) in the dtype of `v`.

    `mask` is boolean, True where a key may be looked at, and broadcasts to (B, heads, Q, L).
    A query that may look at no key has no defined result, so every row needs one True.
    `scale` defaults to ``1 / sqrt(D)``.
    """
    # Queries and keys come out of norms and rotations that may be wider than the projection that
    # made them; the kernels want one dtype, and that of the values is the one chosen for products.
    q_BHQD, k_BHLD = q_BHQD.to(v_BHLD.dtype), k_BHLD.to(v_BHLD.dtype)
    if v_BHLD.device.type == "mps":
        # Metal's kernel was seen to ignore strides (known issue mps-sdpa-noncontiguous).
        q_BHQD, k_BHLD, v_BHLD = (x.contiguous() for x in (q_BHQD, k_BHLD, v_BHLD))
    return F.scaled_dot_product_attention(q_BHQD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)


class AttentionCore(nn.Module):
    """`attention` as a child module, so that it can be watched, hooked or swapped from outside."""

    def forward(
        self, q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return attention(q_BHQD, k_BHLD, v_BHLD, mask)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * D) seen as (B, heads, N, D); nothing is copied."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BHND: Tensor) -> Tensor:
    """(B, heads, N, D) to (B, N, heads * D)."""
    return x_BHND.transpose(1, 2).flatten(2)


def keys_with_a_place_to_look(mask_BL: Tensor) -> Tensor:
    """`mask_BL` with the first key opened in rows that have none.

    The caller sets that key's value to zero, so attention over nothing is zero and not NaN.
    """
    first = torch.zeros_like(mask_BL)
    first[:, 0] = ~mask_BL.any(dim=1)
    return mask_BL | first
