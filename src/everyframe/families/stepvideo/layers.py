"""Layers of Step-Video's denoiser (`model`), under upstream's parameter names.

Input and output are the residual stream (B, N, C): sample, token, channel. Tokens are the patches
of all latent frames in one sequence, frame by frame and row by row. Parameters may have any dtype:
precision hooks cast the inputs of layers with parameters. What depends on the text alone is in
`everyframe.ops.text_context`.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.ops.attention import AttentionCore, merge_heads, split_heads
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.embeddings import PatchProjection, TimestepEmbedding
from everyframe.ops.modulation import Add, GatedAdd, Modulate, ModulationTables
from everyframe.ops.norm import RMSNorm
from everyframe.ops.rope import AxesTable, RotateAxes
from everyframe.ops.text_context import KeysValues

#: Timesteps are 0 (noise) to 1 (data); the sinusoid was trained on 0..1000.
_TIMES = 1000
#: Tokens per chunk of a feed-forward. Without chunks its inner tensor, four times as wide, would be
#: the largest of a run. Tokens are independent; a chunk is large enough to keep any device busy.
_TOKENS_AT_ONCE = 8192


class PatchEmbed(nn.Module):
    """Latents (B, C, T, H, W), H and W multiples of the patch, to tokens (B, N, hidden)."""

    def __init__(self, in_channels: int, hidden_size: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchProjection(in_channels, hidden_size, (patch_size, patch_size))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        p = self.patch_size
        pattern = "b c t (h ph) (w pw) -> b (t h w) (c ph pw)"
        tokens: Tensor = self.proj(rearrange(x_BCTHW, pattern, ph=p, pw=p))
        return tokens


class TimestepMLP(nn.Module):
    """MLP from the 256 sinusoid channels to (B, hidden)."""

    def __init__(self, hidden_size: int, frequency_size: int = 256) -> None:
        super().__init__()
        self.sinusoid = TimestepEmbedding(frequency_size)
        self.linear_1 = nn.Linear(frequency_size, hidden_size)
        self.act = nn.SiLU()
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, t_B: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.act(self.linear_1(self.sinusoid(t_B))))
        return out


class TimestepEmbedder(nn.Module):
    """Wrapper for upstream's parameter names; could embed numbers besides the timestep."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepMLP(hidden_size)

    def forward(self, t_B: Tensor) -> Tensor:
        out: Tensor = self.timestep_embedder(t_B)
        return out


class AdaLayerNormSingle(nn.Module):
    """Timestep modulation shared by all blocks: six tables (B, 6, C), and the embedding (B, C)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.emb = TimestepEmbedder(hidden_size)
        self.silu = nn.SiLU()
        self.linear = nn.Linear(hidden_size, 6 * hidden_size)

    def forward(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """`t_B` is 0..1, float32 or wider."""
        embedded_BC = self.emb(upcast_to_float32(t_B) * _TIMES)
        tables_BKC = self.linear(self.silu(embedded_BC)).unflatten(-1, (6, -1))
        return tables_BKC, embedded_BC


class CaptionProjection(nn.Module):
    """Two linear layers with a tanh-GELU between them."""

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_size, hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, text_BLC: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.act(self.linear_1(text_BLC)))
        return out


class SelfAttention(nn.Module):
    """Self-attention of every token to all tokens of its sample."""

    def __init__(self, config: StepVideoModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.wqkv = nn.Linear(size, 3 * size, bias=False)
        self.q_norm = RMSNorm(config.attention_head_dim)
        self.k_norm = RMSNorm(config.attention_head_dim)
        self.rotate = RotateAxes()
        self.core = AttentionCore()
        self.wo = nn.Linear(size, size, bias=False)

    def forward(self, x_BNC: Tensor, table: AxesTable) -> Tensor:
        # A head's queries, keys and values lie together: q0 k0 v0 q1 k1 v1 and so on.
        q, k, v = split_heads(self.wqkv(x_BNC), self.num_heads).chunk(3, dim=-1)
        q, k = self.rotate(self.q_norm(q), table), self.rotate(self.k_norm(k), table)
        out: Tensor = self.wo(merge_heads(self.core(q, k, v)))
        return out


class CrossAttention(nn.Module):
    """Cross-attention of every token to all text tokens of its sample."""

    def __init__(self, config: StepVideoModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.wq = nn.Linear(size, size, bias=False)
        self.wkv = nn.Linear(size, 2 * size, bias=False)
        self.q_norm = RMSNorm(config.attention_head_dim)
        self.k_norm = RMSNorm(config.attention_head_dim)
        self.core = AttentionCore()
        self.wo = nn.Linear(size, size, bias=False)

    def keys_values(self, text_BLC: Tensor) -> KeysValues:
        """Keys and values of a text; they do not depend on the latents."""
        keys, values = split_heads(self.wkv(text_BLC), self.num_heads).chunk(2, dim=-1)
        return KeysValues(self.k_norm(keys), values)

    def forward(self, x_BNC: Tensor, text: KeysValues, mask: Tensor | None) -> Tensor:
        q = self.q_norm(split_heads(self.wq(x_BNC), self.num_heads))
        out: Tensor = self.wo(merge_heads(self.core(q, text.keys, text.values, mask)))
        return out


class WidenedGELU(nn.Module):
    """Linear layer and tanh-GELU: first half of a feed-forward, with upstream's names."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, width, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.proj(x))
        return out


class FeedForward(nn.Module):
    """Feed-forward, four times as wide inside, without biases."""

    comes_whole = True

    def __init__(self, size: int) -> None:
        super().__init__()
        narrow = nn.Linear(4 * size, size, bias=False)
        self.net = nn.ModuleList([WidenedGELU(size, 4 * size), nn.Identity(), narrow])

    def forward(self, x_BNC: Tensor) -> Tensor:
        widen, _, narrow = self.net
        pieces = [narrow(widen(piece)) for piece in torch.split(x_BNC, _TOKENS_AT_ONCE, dim=1)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


class StepVideoBlock(nn.Module):
    """Residual block: self-attention over all tokens, cross-attention, feed-forward.

    Cross-attention has neither a norm before it nor a gate after it, as in upstream.
    """

    def __init__(self, config: StepVideoModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.scale_shift_table = nn.Parameter(torch.zeros(6, size))
        self.modulation = ModulationTables()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.modulate1, self.modulate2 = Modulate(), Modulate()
        self.attn1, self.attn2 = SelfAttention(config), CrossAttention(config)
        self.ff = FeedForward(size)
        self.add_attn, self.add_text, self.add_ff = GatedAdd(), Add(), GatedAdd()

    def forward(
        self,
        x_BNC: Tensor,
        t_BKC: Tensor,
        text: KeysValues,
        text_mask: Tensor | None,
        table: AxesTable,
    ) -> Tensor:
        """Run the block; `t_BKC` are the six modulation tables of the timestep."""
        shift, scale, gate, shift_ff, scale_ff, gate_ff = self.modulation(
            self.scale_shift_table, t_BKC
        )
        branch = self.attn1(self.modulate1(self.norm1(x_BNC), shift, scale), table)
        x_BNC = self.add_attn(x_BNC, branch, gate)
        x_BNC = self.add_text(x_BNC, self.attn2(x_BNC, text, text_mask))
        branch = self.ff(self.modulate2(self.norm2(x_BNC), shift_ff, scale_ff))
        out: Tensor = self.add_ff(x_BNC, branch, gate_ff)
        return out
