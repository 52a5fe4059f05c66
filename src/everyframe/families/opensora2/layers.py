"""Layers of `MMDiT` (`mmdit`), under upstream's parameter names.

Two residual streams, text (B, L, C) and image (B, N, C), are separate in the double blocks and one
sequence, text first, in the single blocks. Attention always covers both. Parameters may have any
dtype: precision hooks cast the inputs of layers with parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.ops.attention import AttentionCore, merge_heads, split_heads
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.ops.norm import LayerNorm, rms_norm
from everyframe.ops.rope import AxesTable, RotaryTable, Rotate, RotateAxes, axes_table

#: Tokens per chunk of a feed-forward. Without chunks its inner tensor, four times as wide, would be
#: the largest of a run. Tokens are independent; a chunk is large enough to keep any device busy.
_TOKENS_AT_ONCE = 8192

Table = AxesTable | RotaryTable


class MLPEmbedder(nn.Module):
    """Two linear layers with SiLU between them: embedding of a number or a text to (B, C)."""

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_size, hidden_size)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BE: Tensor) -> Tensor:
        out: Tensor = self.out_layer(self.silu(self.in_layer(x_BE)))
        return out


class JointRope(nn.Module):
    """RoPE table of the joint sequence, L + N rows: image tokens rotate by frame, row and column.

    Text tokens do not rotate. The layout is the checkpoint's: halves of a head, or pairs.
    """

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.axes, self.theta, self.is_halves = config.axes_dim, config.theta, config.use_liger_rope

    def forward(
        self, num_text: int, grid: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Table:
        table = axes_table(grid, self.axes, theta=self.theta, dtype=dtype, device=device)
        still = (num_text, table.cos.shape[-1])
        cos = torch.cat([table.cos.new_ones(still), table.cos])
        sin = torch.cat([table.sin.new_zeros(still), table.sin])
        if self.is_halves:
            return AxesTable(cos, sin, (sum(self.axes),))
        return RotaryTable(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2))


class JoinStreams(nn.Module):
    """Concatenate text and image tokens along `dim`, text first."""

    def forward(self, text: Tensor, picture: Tensor, dim: int) -> Tensor:
        return torch.cat([text, picture], dim)


class SplitStreams(nn.Module):
    """The inverse of `JoinStreams`, along dimension 1."""

    def forward(self, joint_BNC: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
        return joint_BNC[:, :num_text], joint_BNC[:, num_text:]


class Modulation(nn.Module):
    """Tables of a block from the modulation vector: shift, scale and gate, once or twice."""

    def __init__(self, hidden_size: int, num_tables: int) -> None:
        super().__init__()
        self.num_tables = num_tables
        self.silu = nn.SiLU()
        self.lin = nn.Linear(hidden_size, num_tables * hidden_size)

    def forward(self, vector_BC: Tensor) -> tuple[Tensor, ...]:
        """`num_tables` tables (B, 1, C), float32 or wider: one scales all tokens alike."""
        tables = upcast_to_float32(self.lin(self.silu(vector_BC)))
        return tables[:, None].chunk(self.num_tables, dim=-1)


class ScaledRMSNorm(nn.Module):
    """`rms_norm` under upstream's parameter name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale)


class QKNorm(nn.Module):
    """Norms of queries and keys, (B, heads, N, D) each."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.query_norm, self.key_norm = ScaledRMSNorm(head_size), ScaledRMSNorm(head_size)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class QKV(NamedTuple):
    """Queries, keys and values, (B, heads, N, D) each."""

    q: Tensor
    k: Tensor
    v: Tensor


class StreamAttention(nn.Module):
    """One stream's projections before (`forward`) and after (`proj`) the joint attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.qkv_bias
        self.num_heads = config.num_heads
        if config.fused_qkv:
            self.qkv = nn.Linear(size, 3 * size, bias=bias)
        else:
            self.q_proj = nn.Linear(size, size, bias=bias)
            self.k_proj = nn.Linear(size, size, bias=bias)
            self.v_proj = nn.Linear(size, size, bias=bias)
        self.norm = QKNorm(config.head_size)
        self.proj = nn.Linear(size, size)

    def forward(self, x_BNC: Tensor) -> QKV:
        if hasattr(self, "qkv"):
            parts = self.qkv(x_BNC).chunk(3, dim=-1)
        else:
            parts = (self.q_proj(x_BNC), self.k_proj(x_BNC), self.v_proj(x_BNC))
        q, k, v = (split_heads(part, self.num_heads) for part in parts)
        q, k = self.norm(q, k)
        return QKV(q, k, v)


class JointAttention(nn.Module):
    """Rotation and softmax attention over the joint sequence. No parameters."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.rotate = RotateAxes() if config.use_liger_rope else Rotate()
        self.core = AttentionCore()

    def forward(self, qkv: QKV, table: Table) -> Tensor:
        """Results (B, N, C) of every token."""
        q, k = self.rotate(qkv.q, table), self.rotate(qkv.k, table)
        return merge_heads(self.core(q, k, qkv.v))


class FeedForward(nn.Sequential):
    """Linear layer, tanh-GELU, linear layer, in chunks of tokens."""

    comes_whole = True

    def __init__(self, config: MMDiTConfig) -> None:
        size, width = config.hidden_size, config.mlp_size
        super().__init__(
            nn.Linear(size, width), nn.GELU(approximate="tanh"), nn.Linear(width, size)
        )

    def forward(self, x_BNC: Tensor) -> Tensor:
        widen, act, narrow = self
        pieces = [narrow(act(widen(part))) for part in torch.split(x_BNC, _TOKENS_AT_ONCE, dim=1)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


class DoubleBlock(nn.Module):
    """Residual block with separate parameters for each stream and one joint attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.img_mod, self.txt_mod = Modulation(size, 6), Modulation(size, 6)
        self.img_norm1, self.txt_norm1 = LayerNorm(), LayerNorm()
        self.img_modulate1, self.txt_modulate1 = Modulate(), Modulate()
        self.img_attn, self.txt_attn = StreamAttention(config), StreamAttention(config)
        self.join, self.attention, self.split = (
            JoinStreams(),
            JointAttention(config),
            SplitStreams(),
        )
        self.img_add1, self.txt_add1 = GatedAdd(), GatedAdd()
        self.img_norm2, self.txt_norm2 = LayerNorm(), LayerNorm()
        self.img_modulate2, self.txt_modulate2 = Modulate(), Modulate()
        self.img_mlp, self.txt_mlp = FeedForward(config), FeedForward(config)
        self.img_add2, self.txt_add2 = GatedAdd(), GatedAdd()

    def forward(
        self, text_BLC: Tensor, img_BNC: Tensor, vector_BC: Tensor, table: Table
    ) -> tuple[Tensor, Tensor]:
        """Both streams; `vector_BC` is the modulation vector of the timestep."""
        shift_i, scale_i, gate_i, *img_tables = self.img_mod(vector_BC)
        shift_t, scale_t, gate_t, *text_tables = self.txt_mod(vector_BC)
        img = self.img_attn(self.img_modulate1(self.img_norm1(img_BNC), shift_i, scale_i))
        text = self.txt_attn(self.txt_modulate1(self.txt_norm1(text_BLC), shift_t, scale_t))
        joint = QKV(*(self.join(a, b, 2) for a, b in zip(text, img, strict=True)))
        del text, img
        seen_t, seen_i = self.split(self.attention(joint, table), text_BLC.shape[1])
        del joint
        img_BNC = self.img_add1(img_BNC, self.img_attn.proj(seen_i), gate_i)
        text_BLC = self.txt_add1(text_BLC, self.txt_attn.proj(seen_t), gate_t)
        shift, scale, gate = img_tables
        branch = self.img_mlp(self.img_modulate2(self.img_norm2(img_BNC), shift, scale))
        img_BNC = self.img_add2(img_BNC, branch, gate)
        shift, scale, gate = text_tables
        branch = self.txt_mlp(self.txt_modulate2(self.txt_norm2(text_BLC), shift, scale))
        return self.txt_add2(text_BLC, branch, gate), img_BNC


class SingleBlock(nn.Module):
    """Residual block of the joint sequence: attention and feed-forward side by side.

    One linear layer computes values and the feed-forward's hidden states, values first.
    """

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.mlp_size
        self.num_heads, self.widths = config.num_heads, (size, size, size, width)
        if config.fused_qkv:
            self.linear1 = nn.Linear(size, 3 * size + width)
        else:
            self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
            if config.is_diffusers:
                self.v_proj, self.mlp_in = nn.Linear(size, size), nn.Linear(size, width)
            else:
                self.v_mlp = nn.Linear(size, size + width)
        self.modulation, self.pre_norm, self.modulate = Modulation(size, 3), LayerNorm(), Modulate()
        self.norm, self.attention = QKNorm(config.head_size), JointAttention(config)
        self.act = nn.GELU(approximate="tanh")
        self.linear2 = nn.Linear(size + width, size)
        self.add = GatedAdd()

    def forward(self, x_BNC: Tensor, vector_BC: Tensor, table: Table) -> Tensor:
        """The joint sequence; `vector_BC` is the modulation vector of the timestep."""
        shift, scale, gate = self.modulation(vector_BC)
        qkv, mlp = self._project(self.modulate(self.pre_norm(x_BNC), shift, scale))
        seen = self.attention(qkv, table)
        del qkv
        both = zip(
            *(torch.split(part, _TOKENS_AT_ONCE, dim=1) for part in (seen, mlp)), strict=True
        )
        pieces = [self.linear2(torch.cat([one, self.act(other)], -1)) for one, other in both]
        branch = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        out: Tensor = self.add(x_BNC, branch, gate)
        return out

    def _project(self, x_BNC: Tensor) -> tuple[QKV, Tensor]:
        """Queries, keys and values, and the feed-forward's hidden states (B, N, width)."""
        if hasattr(self, "linear1"):
            q, k, v, mlp = self.linear1(x_BNC).split(self.widths, dim=-1)
        else:
            q, k = self.q_proj(x_BNC), self.k_proj(x_BNC)
            if hasattr(self, "v_mlp"):
                v, mlp = self.v_mlp(x_BNC).split(self.widths[2:], dim=-1)
            else:
                v, mlp = self.v_proj(x_BNC), self.mlp_in(x_BNC)
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        q, k = self.norm(q, k)
        return QKV(q, k, v), mlp


class LastLayer(nn.Module):
    """Modulated norm and projection to the features of a token."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        size, self.is_scale_first = config.hidden_size, config.is_diffusers
        self.norm, self.modulate = LayerNorm(), Modulate()
        self.linear = nn.Linear(size, config.in_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 2 * size))

    def forward(self, x_BNC: Tensor, vector_BC: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vector_BC)[:, None].chunk(2, dim=-1)
        if self.is_scale_first:
            shift, scale = scale, shift
        out: Tensor = self.linear(self.modulate(self.norm(x_BNC), shift, scale))
        return out
