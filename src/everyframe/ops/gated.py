"""A feed-forward with a gate: widened, gated by GELU, made narrow again.

Not here: the layers themselves, which are the model's. Read next: `attention`, `norm`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.ops.device import counted, kind_of

#: On a CPU, this many tokens at once, where all of them widened would be more than so many numbers.
#: What is widened then stays in the processor's caches: with 128 channels, 28,672 tokens and
#: bfloat16 on one core, 83 ms in place of 109, and of 136 without sums in place.
_ROWS = 2048
_MANY = 2**23


def gated_gelu(
    x: Tensor,
    widen: Callable[[Tensor], Tensor],
    narrow: Callable[[Tensor], Tensor],
    width: int,
) -> Tensor:
    """``narrow(u * gelu(g))`` of tokens (..., C), where ``u, g = widen(x)``, `width` wide each.

    Each token by itself, so that pieces change no formula; their size depends on shapes alone.
    """
    tokens = x.flatten(0, -2)
    if kind_of(x) != "cpu" or tokens.shape[0] * 2 * width <= _MANY:
        return _whole(x, widen, narrow)
    pieces = torch.split(tokens, _ROWS)
    first = _whole(pieces[0], widen, narrow)
    out = first.new_empty(tokens.shape[0], first.shape[-1])
    out[:_ROWS] = first
    if x.is_meta:  # one piece stands for all that are alike
        with counted(tokens.shape[0] / _ROWS - 1):
            out[:_ROWS] = _whole(pieces[0], widen, narrow)
        pieces = pieces[:1]
    for number, piece in enumerate(pieces[1:], start=1):
        out[number * _ROWS : (number + 1) * _ROWS] = _whole(piece, widen, narrow)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _whole(
    x: Tensor, widen: Callable[[Tensor], Tensor], narrow: Callable[[Tensor], Tensor]
) -> Tensor:
    value, gate = torch.chunk(widen(x), 2, dim=-1)
    return narrow(F.gelu(gate).mul_(value))
