"""Layers shared by Open-Sora 1.0 (`stdit`) and 1.2 (`stdit3`), under upstream's parameter names.

Input and output are the residual stream (B, T, S, C): sample, latent frame, patch of a frame (row
by row), channel. Attention reshapes to its rows right around the attention core, so sequence
parallelism can split frames or patches from outside. Parameters may have any dtype: precision
hooks cast the inputs of layers with parameters. Without hooks everything runs in one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from everyframe.families.opensora.config import DenoiserConfig
from everyframe.families.opensora.model_inputs import cut_to_longest
from everyframe.ops.attention import AttentionCore, merge_heads, split_heads
from everyframe.ops.embeddings import PatchProjection, TimestepEmbedding
from everyframe.ops.modulation import Modulate, ModulationTables, SelectByFrame
from everyframe.ops.norm import LayerNorm, RMSNorm
from everyframe.ops.rope import RotaryTable, Rotate
from everyframe.ops.text_context import KeysValues, TextContext, context_of

Size3 = tuple[int, int, int]
"""Frames, rows, columns."""


class PatchEmbed(nn.Module):
    """Latents (B, C, T, H, W) to tokens (B, T', S, hidden), padded right and bottom to a patch."""

    def __init__(self, in_channels: int, hidden_size: int, patch_size: Size3) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchProjection(in_channels, hidden_size, patch_size)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        padding = [
            -size % patch for size, patch in zip(x_BCTHW.shape[2:], self.patch_size, strict=True)
        ]
        if any(padding):
            pad_t, pad_h, pad_w = padding
            x_BCTHW = F.pad(x_BCTHW, (0, pad_w, 0, pad_h, 0, pad_t))
        t, h, w = self.patch_size
        pattern = "b c (t pt) (h ph) (w pw) -> b t (h w) (c pt ph pw)"
        patches = rearrange(x_BCTHW, pattern, pt=t, ph=h, pw=w)
        tokens: Tensor = self.proj(patches)
        return tokens


def unpatchify(x: Tensor, grid: Size3, patch_size: Size3, latent_size: Size3) -> Tensor:
    """(B, T', S, patch volume * C), channels last, to (B, C, T, H, W), with the padding cut off."""
    pattern = "b t (h w) (pt ph pw c) -> b c (t pt) (h ph) (w pw)"
    t, h, w = patch_size
    x = rearrange(x, pattern, h=grid[1], w=grid[2], pt=t, ph=h, pw=w)
    frames, rows, columns = latent_size
    return x[:, :, :frames, :rows, :columns]


def token_grid(latent_size: Size3, patch_size: Size3) -> Size3:
    """Frames, rows and columns of patches that cover the latents."""
    t, h, w = (-(-size // patch) for size, patch in zip(latent_size, patch_size, strict=True))
    return t, h, w


class MLP(nn.Module):
    """Two linear layers with a tanh-GELU between them."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_size, hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class ScalarEmbedder(nn.Module):
    """Sinusoidal embedding of one number per sample, (B,) to (B, hidden), and two linear layers.

    Parameter names are upstream's.
    """

    def __init__(self, hidden_size: int, frequency_size: int = 256) -> None:
        super().__init__()
        self.sinusoid = TimestepEmbedding(frequency_size)
        self.mlp = nn.Sequential(
            nn.Linear(frequency_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, number_B: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.sinusoid(number_B))
        return out


class CaptionEmbedder(nn.Module):
    """Project text encoder states (B, L, caption_channels) to (B, L, hidden).

    ``y_embedding`` (L, caption_channels) is the null text: it replaces the states where there is no
    text, and goes through the same layers. Called without a text, the module returns its
    projection.
    """

    def __init__(self, caption_channels: int, hidden_size: int, model_max_length: int) -> None:
        super().__init__()
        self.y_embedding = nn.Parameter(torch.zeros(model_max_length, caption_channels))
        self.y_proj = MLP(caption_channels, hidden_size, hidden_size)

    def forward(self, text: Tensor | None = None) -> Tensor:
        out: Tensor = self.y_embedding if text is None else self.y_proj(text)
        return out


class Axis(Enum):
    """Axis of attention: tokens of one frame (SPACE), or of one place in all frames (TIME)."""

    SPACE = "space"
    TIME = "time"


class SelfAttention(nn.Module):
    """Self-attention within each frame (SPACE) or along time at each place (TIME).

    For SPACE, T is only a number of rows: (1, rows, S, C) with any rows of a batch works too. So
    does (B, T, any places, C) for TIME.
    """

    def __init__(self, hidden_size: int, num_heads: int, axis: Axis, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads, self.axis = num_heads, axis
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        head_size = hidden_size // num_heads
        self.q_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.rotate = Rotate()
        self.core = AttentionCore()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTSC: Tensor, table: RotaryTable | None = None) -> Tensor:
        """Attend along the axis; `table` applies RoPE to queries and keys by position."""
        qkv_BTS3C: Tensor = self.qkv(x_BTSC)
        if self.axis is Axis.TIME:
            qkv_BTS3C = qkv_BTS3C.transpose(1, 2)
        outer = qkv_BTS3C.shape[:2]
        q, k, v = (split_heads(part, self.num_heads)
                   for part in qkv_BTS3C.flatten(0, 1).chunk(3, dim=-1))  # fmt: skip
        q, k = self.q_norm(q), self.k_norm(k)
        if table is not None:
            q, k = self.rotate(q, table), self.rotate(k, table)
        x = torch.unflatten(merge_heads(self.core(q, k, v)), 0, outer)
        if self.axis is Axis.TIME:
            x = x.transpose(1, 2)
        # A product of a non-contiguous tensor runs row by row; one copy is cheaper.
        out: Tensor = self.proj(x.contiguous())
        return out


class CrossAttention(nn.Module):
    """Cross-attention of every token to all text tokens of its sample."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.kv_linear = nn.Linear(hidden_size, 2 * hidden_size)
        self.core = AttentionCore()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def keys_values(self, text_BLC: Tensor) -> KeysValues:
        """Keys and values of a text; they do not depend on the latents."""
        keys, values = self.kv_linear(text_BLC).chunk(2, dim=-1)
        return KeysValues(split_heads(keys, self.num_heads), split_heads(values, self.num_heads))

    def forward(self, x_BTSC: Tensor, text: KeysValues, mask: Tensor | None) -> Tensor:
        q = split_heads(self.q_linear(x_BTSC).flatten(1, 2), self.num_heads)
        x_BNC = merge_heads(self.core(q, text.keys, text.values, mask))
        out: Tensor = self.proj(torch.unflatten(x_BNC, 1, x_BTSC.shape[1:3]))
        return out


class TextConditioned(nn.Module):
    """Text conditioning of both denoisers; their blocks have `cross_attn`."""

    config: DenoiserConfig
    y_embedder: CaptionEmbedder

    def blocks_in_order(self) -> Sequence[nn.Module]:
        """Blocks in execution order."""
        raise NotImplementedError

    def null_text(self) -> Tensor:
        """Null text (L, caption_channels), used where there are no text encoder states."""
        # By a call, which brings offloaded weights.
        out: Tensor = self.y_embedder()
        return out

    def context(self, text_BLD: Tensor, mask_BL: Tensor | None = None) -> TextContext:
        """Text context of the blocks, once per prompt.

        See `model_inputs.cut_to_longest` for shapes.
        """
        tokens = cut_to_longest(text_BLD, mask_BL, self.config.caption_channels)
        y_BLC = self.y_embedder(tokens.text)
        attentions: Any = [block.cross_attn for block in self.blocks_in_order()]
        blocks = [each.keys_values(y_BLC) for each in attentions]
        # Rows without a token attend to zero.
        return context_of(blocks, tokens.mask, tokens.empty)


class FinalLayer(nn.Module):
    """Norm, modulation by the timestep embedding itself, and projection to patches."""

    def __init__(self, hidden_size: int, out_size: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(2, hidden_size))
        self.modulation = ModulationTables()
        self.norm_final = LayerNorm()
        self.modulate = Modulate()
        self.pick = SelectByFrame()
        self.linear = nn.Linear(hidden_size, out_size)

    def forward(
        self,
        x_BTSC: Tensor,
        t_BC: Tensor,
        t0_BC: Tensor | None = None,
        x_mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T, S, out).

        Frames where `x_mask_BT` is False are conditioning frames, modulated by `t0_BC`.
        """
        x_BTSC = self._modulate(x_BTSC, t_BC)
        if x_mask_BT is not None and t0_BC is not None:
            # Upstream normalises and modulates given frames twice, first with t, then with t0;
            # its weights were trained with that.
            again = self._modulate(x_BTSC, t0_BC)
            x_BTSC = self.pick(x_BTSC, again, x_mask_BT[:, :, None, None])
        out: Tensor = self.linear(x_BTSC)
        return out

    def _modulate(self, x_BTSC: Tensor, t_BC: Tensor) -> Tensor:
        shift, scale = self.modulation(self.scale_shift_table, t_BC[:, None, None])
        out: Tensor = self.modulate(self.norm_final(x_BTSC), shift, scale)
        return out
