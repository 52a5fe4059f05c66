"""Wan's blocks and attention in diffusers, with modulation, gates and rotation by kernels in C.

Several files of diffusers have the same classes, so a subclass is made of each one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everyframe.ops.modulation import gated_add, modulation_tables
from everyframe.ops.native import kernels


def _names(name: str) -> frozenset[str]:
    """Full names of a class that each of the files has."""
    files = "wan", "chronoedit", "wan_animate"
    return frozenset(f"diffusers.models.transformers.transformer_{file}.{name}" for file in files)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_BLOCKS, _ATTENTIONS = _names("WanTransformerBlock"), _names("WanAttention")
_PROCESSORS = _names("WanAttnProcessor")


class _Block(nn.Module):
    """A block whose norms scale and shift, and whose gated branches are added, in one pass each.

    Attributes:
        unchanged: children that compute the same with and without the kernels.
    """

    is_plain = False
    unchanged: ClassVar = ("attn1", "norm2", "attn2", "ffn")
    scale_shift_table: Tensor
    norm1: nn.LayerNorm
    attn1: nn.Module
    norm2: nn.Module
    attn2: nn.Module
    norm3: nn.LayerNorm
    ffn: nn.Module

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
    ) -> Tensor:
        x = hidden_states
        # The embedding of a timestep is for a sample, or for each of its tokens.
        has_tables = temb.shape[:-2] in (x.shape[:1], x.shape[:2])
        if self.is_plain or not has_tables or not kernels.supports(x):
            plain: Tensor = super().forward(x, encoder_hidden_states, temb, rotary_emb)
            return plain
        shift, scale, gate, late_shift, late_scale, late_gate = modulation_tables(
            self.scale_shift_table, temb
        )
        y = kernels.layer_norm(x, 1 + scale, shift, self.norm1.eps)
        x = _gated_add(x, self.attn1(y, None, None, rotary_emb), gate)
        x = x + self.attn2(self.norm2(x), encoder_hidden_states, None, None)
        y = kernels.layer_norm(x, 1 + late_scale, late_shift, self.norm3.eps)
        return _gated_add(x, self.ffn(y), late_gate)


def _gated_add(x_BNC: Tensor, branch_BNC: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * branch``; a processor of somebody's own may give another dtype."""
    if kernels.supports(branch_BNC):
        return kernels.gated_add(x_BNC, branch_BNC, gate)
    gate_BNC = gate.view(len(x_BNC), -1, x_BNC.shape[-1])
    return gated_add(x_BNC.float(), branch_BNC.float(), gate_BNC).type_as(x_BNC)


class _Attention(nn.Module):
    """Attention whose queries and keys rotate after their norms, in one pass each."""

    is_plain = False
    unchanged: ClassVar = ("to_q", "to_k", "to_v", "to_out.0")
    processor: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        x, given = hidden_states, (encoder_hidden_states, attention_mask)
        is_known = _name_of(type(self.processor)) in _PROCESSORS
        if self.is_plain or rotary_emb is None or not is_known or not kernels.supports(x):
            return super().forward(x, *given, rotary_emb, **kwargs)
        return self.processor(_Rotating(self, *rotary_emb), x, *given, None, **kwargs)


class _Rotating:
    """What a processor sees of an attention whose norms rotate queries and keys as well."""

    def __init__(self, attention: Any, cos: Tensor, sin: Tensor) -> None:
        self._attention, self._cos, self._sin = attention, cos, sin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def norm_q(self, queries_BNC: Tensor) -> Tensor:
        return self._rotate(self._attention.norm_q(queries_BNC))

    def norm_k(self, keys_BNC: Tensor) -> Tensor:
        return self._rotate(self._attention.norm_k(keys_BNC))

    def _rotate(self, x_BNC: Tensor) -> Tensor:
        x_BHND = torch.unflatten(x_BNC, 2, (self._attention.heads, -1)).transpose(1, 2)
        return kernels.rotate(x_BHND, self._cos, self._sin).transpose(1, 2).flatten(2)


@cache
def fused_kind(path: str, own: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass of one of Wan's classes that this path computes by; None for other classes."""
    if path == "native-gate" and _name_of(own) in _BLOCKS:
        kind: type[nn.Module] = _Block
    elif path == "native-rope" and _name_of(own) in _ATTENTIONS:
        kind = _Attention
    else:
        return None
    # Still of diffusers' module: the path of attention in C makes a subclass of it in turn.
    return type(f"Fused{own.__name__}", (kind, own), {"__module__": own.__module__})
