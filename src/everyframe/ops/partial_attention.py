"""Attention to a part of the keys, with what it takes to merge the parts to attention to all.

The softmax over a part is right but for one number a query, the logarithm of the sum of its
exponentials; by that, answers of any parts merge to the answer of the whole (arXiv 1805.02867,
2205.14135). PyTorch's fused kernels keep that number for themselves, so here are two plain
products, some queries at a time, with scores and sums in float32 at least: on every device.
Not here: which keys are where (`everyframe.parallel.ring`). One part alone: `attention`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from everyframe.ops.dtypes import float32_or_wider

#: So many scores are made at once.
_SCORES = 1 << 25


class Partial(NamedTuple):
    """Answers (B, heads, Q, D) to some of the keys, and the log-sum-exp (B, heads, Q) of scores.

    Both float32 at least. A query that may look at none of these keys has zeros and minus infinity.
    """

    out: Tensor
    lse: Tensor


def partial_attention(
    q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
) -> Partial:
    """``softmax(q k^T / sqrt(D)) v`` of these keys.

    `mask` broadcasts to (B, heads, Q, L); boolean, it is True where a key may be looked at,
    floating, it is added to the scores.
    """
    wide = float32_or_wider(v_BHLD.dtype)
    batch, heads, length, width = q_BHQD.shape
    at_once = max(1, _SCORES // max(1, batch * heads * k_BHLD.shape[2]))
    k_BHDL, v_BHLD = k_BHLD.to(wide).mT, v_BHLD.to(wide)
    out = q_BHQD.new_empty((batch, heads, length, v_BHLD.shape[-1]), dtype=wide)
    lse = q_BHQD.new_empty((batch, heads, length), dtype=wide)
    if not k_BHLD.shape[2]:
        return Partial(out.zero_(), lse.fill_(-torch.inf))
    for start in range(0, length, at_once):
        here = slice(start, start + at_once)
        scores = (q_BHQD[:, :, here].to(wide) / math.sqrt(width)) @ k_BHDL
        if mask is not None:
            part = mask[:, :, here] if mask.shape[2] > 1 else mask
            is_choice = part.dtype == torch.bool
            scores = scores.masked_fill(~part, -torch.inf) if is_choice else scores + part
        top = _finite(scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        lse[:, :, here] = (top + total.log())[..., 0]
        # Where there was nothing to look at all weights are zero, and so is the answer.
        out[:, :, here] = (weights @ v_BHLD) / total.masked_fill(total == 0, 1)
    return Partial(out, lse)


def merge(one: Partial, other: Partial) -> Partial:
    """Attention to the keys of both."""
    lse = torch.logaddexp(one.lse, other.lse)
    base = _finite(lse)
    weights = ((part.lse - base).exp()[..., None] for part in (one, other))
    first, second = (part.out * weight for part, weight in zip((one, other), weights, strict=True))
    return Partial(first + second, lse)


def _finite(x: Tensor) -> Tensor:
    """Zero where there was nothing to look at: then differences from it are minus infinity."""
    return x.masked_fill(x == -torch.inf, 0)
