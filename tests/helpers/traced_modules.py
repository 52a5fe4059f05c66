"""A small transformer of our own to trace, and faults to plant in it.

As a foreign module it imports nothing of Everyframe. Its attention core is a child module, so that
tests can replace it. Used by the tests of traces.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

TOKENS, WIDTH, HEADS, STEPS = 300, 32, 2, 3


class Core(nn.Module):
    """Attention as PyTorch has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class HalfAccumulating(nn.Module):
    """Attention whose sum over the keys is kept in half precision: right on short rows alone."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights, values = logits.softmax(-1).to(self.dtype), v.to(self.dtype)
        total = torch.zeros_like(q, dtype=self.dtype)
        for key in range(k.shape[-2]):
            total = total + weights[..., key : key + 1] * values[..., key : key + 1, :]
        return total.to(q.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core: nn.Module = Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.core(q, k, v + 1).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    """Tokens and a timestep to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor, *, shift: float = 0.0) -> Tensor:
        x = self.embed(x) + t[:, None, None] + shift
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net(seed: int = 0) -> Net:
    """One with random weights."""
    torch.manual_seed(seed)
    return Net().eval()


def planted(module: Net, block: int, dtype: torch.dtype = torch.float16) -> Net:
    """The same with a half-precision sum in the attention of that block."""
    changed = copy.deepcopy(module)
    changed.blocks[block].attn.core = HalfAccumulating(dtype)
    return changed


@torch.no_grad()
def sample(module: nn.Module, *, tokens: int = TOKENS, steps: int = STEPS, seed: int = 1) -> Tensor:
    """Some steps, as a sampler makes them; the state is kept in float32."""
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    dtype = next(module.parameters()).dtype
    for step in range(steps):
        answer = module(x.to(dtype), torch.full((1,), 1 - step / steps, dtype=dtype))
        x = x - answer.float() / steps
    return x
