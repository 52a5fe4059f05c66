"""Self-attention with its projections, in a frame and over frames, in diffusers' parameters.

A fast path replaces these modules from outside. The softmax is in `everyframe.ops.attention`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from everyframe.ops.attention import attention, merge_heads, split_heads


class SelfAttention(nn.Module):
    """Self-attention within each row of tokens (N, L, C), with diffusers' parameters."""

    to_q: Any
    to_k: Any
    to_v: Any
    to_out: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.heads, self.scale = theirs.heads, theirs.scale
        for name, child in theirs.named_children():
            self.add_module(name, child)

    def forward(self, rows_NLC: Tensor) -> Tensor:
        q, k, v = (
            split_heads(project(rows_NLC), self.heads)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        return self.out(merge_heads(attention(q, k, v, scale=self.scale)))

    def out(self, x: Tensor) -> Tensor:
        """The last projection; diffusers' dropout after it does nothing here."""
        answer: Tensor = self.to_out[0](x)
        return answer


class TemporalAttention(SelfAttention):
    """Self-attention of each pixel over its frames, of tokens (b, T, s, C)."""

    def forward(self, x_bTsC: Tensor) -> Tensor:
        # Contiguous by pixel, once for queries, keys and values.
        x_bsTC = x_bTsC.transpose(1, 2).contiguous()
        attended = super().forward(x_bsTC.flatten(0, 1))
        return attended.reshape(x_bsTC.shape).transpose(1, 2)
