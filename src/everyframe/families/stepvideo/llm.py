"""Step-LLM, the decoder-only language model whose last hidden states condition Step-Video.

Upstream's attention is a closed binary for a few CUDA versions. Here it is PyTorch's attention
with a distance bias (`Bias`), the model's only position information. There is no padding mask:
attention is causal, so padding at the end changes no earlier token. Parameter names are upstream's.
Source: stepfun-ai/Step-Video-T2V 675e08c, stepvideo/text_encoder/stepllm.py.
"""

from __future__ import annotations

from enum import Enum
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.families.stepvideo.config import StepLLMConfig
from everyframe.ops.attention import AttentionCore, merge_heads, split_heads
from everyframe.ops.dtypes import upcast_to_float32
from everyframe.ops.norm import RMSNorm


class Bias(Enum):
    """Bias added to the attention score of query i and key j, for a head with slope s.

    Uncertain: SQRT is derived from StepFun's fallback for the same call in its Step-1 models and
    has not been compared with the binary; NONE is what DiffSynth-Studio uses, LINEAR is plain
    ALiBi.
    """

    SQRT = "sqrt"
    """``-s sqrt(i - j)``"""
    LINEAR = "linear"
    """``-s (i - j)`` (Press et al. 2022, arXiv 2108.12409)"""
    NONE = "none"
    """0: words without an order but before and after"""


def slopes(num_heads: int) -> Tensor:
    """ALiBi slopes (heads,), float64: powers of 2^(-8/n) for the largest power of two n.

    Heads beyond n use every other slope of the series for 2n.
    """
    n = 2 ** (num_heads.bit_length() - 1)
    exponents = [-8 * h / n for h in range(1, n + 1)]
    exponents += [-4 * (2 * r + 1) / n for r in range(num_heads - n)]
    return torch.pow(2.0, torch.tensor(exponents, dtype=torch.float64, device="cpu"))


def causal_bias(
    num_heads: int, length: int, kind: Bias = Bias.SQRT, device: torch.device | str = "cpu"
) -> Tensor:
    """(heads, length, length) float32: bias of each earlier or own position, else -infinity."""
    places = torch.arange(length, dtype=torch.float64, device="cpu")
    distance = places[:, None] - places
    steps = distance.clamp(min=0)
    if kind is Bias.SQRT:
        steps = steps.sqrt()
    elif kind is Bias.NONE:
        steps = torch.zeros_like(steps)
    bias = -slopes(num_heads)[:, None, None] * steps
    return bias.masked_fill(distance < 0, float("-inf")).to(torch.float32).to(device)


class BiasedAttention(nn.Module):
    """Grouped-query attention with bias; scores, bias and softmax in float32 or wider.

    Texts are short, so float32 costs nothing, and a distance of 17.9 is not rounded.
    """

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_size
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_attention_groups
        self.head_size = head
        self.wqkv = nn.Linear(size, size + 2 * head * self.num_groups, bias=False)
        self.core = AttentionCore()
        self.wo = nn.Linear(size, size, bias=False)

    def forward(self, x_BLC: Tensor, bias_HLL: Tensor) -> Tensor:
        qkv = self.wqkv(x_BLC)
        size = self.num_heads * self.head_size
        q = split_heads(qkv[..., :size], self.num_heads)
        # A group's keys and values lie together: k0 v0 k1 v1 and so on.
        k, v = split_heads(qkv[..., size:], self.num_groups).chunk(2, dim=-1)
        shared = self.num_heads // self.num_groups
        k, v = (each.repeat_interleave(shared, dim=1) for each in (k, v))
        q, k, v = (upcast_to_float32(each) for each in (q, k, v))
        out: Tensor = self.wo(merge_heads(self.core(q, k, v, bias_HLL.to(v.dtype))))
        return out


class GatedFeedForward(nn.Module):
    """``w2(silu(a) b)`` where ``a, b = w1(x)``; without biases."""

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.ffn_size, bias=False)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x_BLC: Tensor) -> Tensor:
        gate, value = self.w1(x_BLC).chunk(2, dim=-1)
        out: Tensor = self.w2(F.silu(gate) * value)
        return out


class StepLLMLayer(nn.Module):
    """Residual layer: attention and feed-forward, each after a norm."""

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.attention = BiasedAttention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.feed_forward = GatedFeedForward(config)

    def forward(self, x_BLC: Tensor, bias_HLL: Tensor) -> Tensor:
        x_BLC = x_BLC + self.attention(self.attention_norm(x_BLC), bias_HLL)
        out: Tensor = x_BLC + self.feed_forward(self.ffn_norm(x_BLC))
        return out


class WordEmbeddings(nn.Module):
    """Wrapper for upstream's parameter names."""

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, ids_BL: Tensor) -> Tensor:
        out: Tensor = self.word_embeddings(ids_BL)
        return out


class Layers(nn.Module):
    """All layers in order; there is no final norm."""

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([StepLLMLayer(config) for _ in range(config.num_layers)])

    def forward(self, x_BLC: Tensor, bias_HLL: Tensor) -> Tensor:
        for layer in cast(list[StepLLMLayer], list(self.layers)):
            x_BLC = layer(x_BLC, bias_HLL)
        return x_BLC


class StepLLM(nn.Module):
    """Token ids (B, L) to the last layer's hidden states (B, L, hidden), float32 or wider."""

    def __init__(self, config: StepLLMConfig, bias: Bias = Bias.SQRT) -> None:
        super().__init__()
        self.config, self.bias = config, bias
        self.tok_embeddings = WordEmbeddings(config)
        self.transformer = Layers(config)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLC = upcast_to_float32(self.tok_embeddings(ids_BL))
        heads, length = self.config.num_attention_heads, ids_BL.shape[1]
        bias = causal_bias(heads, length, self.bias, ids_BL.device)
        return upcast_to_float32(self.transformer(x_BLC, bias))
