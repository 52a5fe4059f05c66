"""Dequantize blocks of the most common GGUF types with torch, bit for bit as the `gguf` package.

The package computes in NumPy with a large array for each operation. Here codes are assembled as
bytes and then widened into the result, with the same operations in the same order: a product, then
a difference, each rounded to float32.
Layouts: https://github.com/ggml-org/ggml, `src/ggml-common.h` and `ggml-quants.c`.

Shapes: N blocks of B bytes and E elements; K kinds of 256 elements have groups of 32 or 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Elements of one pass: its codes stay in a core's own cache, and the calls for scales are few.
_AT_ONCE = 1 << 18


def widen_blocks(blocks_NB: Tensor, kind: str, out: Tensor) -> None:
    """Write the values of blocks, uint8 (N, B), into `out`, float32 (N, E); kinds in `WIDENED`."""
    step = max(1, _AT_ONCE // out.shape[1])
    for first in range(0, len(out), step):
        WIDENED[kind](blocks_NB[first : first + step], out[first : first + step])


def _half(blocks: Tensor, first: int) -> Tensor:
    """float16 numbers at a byte of each block, as float32 (N, 1)."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, groups: int) -> Tensor:
    """Low halves of each group of bytes, then its high halves, uint8 (N, E)."""
    codes = codes.reshape(len(codes), groups, 1, -1)
    halves = torch.cat([codes & 15, codes >> 4], 2)
    return halves.view(len(codes), -1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Bit fields of each byte, lowest first, shifted left by 4: (N, fields, bytes)."""
    mask = (1 << bits) - 1
    return torch.stack([((packed >> shift) & mask) << 4 for shift in range(0, 8, bits)], 1)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 2:], 1)).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 4:], 1)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _five_bits(blocks: Tensor, first: int) -> Tensor:
    """Codes of Q5_0 and Q5_1; the fifth bits of all elements are 4 bytes, in order."""
    fifth = _fields(blocks[:, first : first + 4], 1).transpose(1, 2).reshape(len(blocks), -1)
    return fifth.bitwise_or_(_nibbles(blocks[:, first + 4 :], 1))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_five_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_five_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _scale_and_shift(blocks: Tensor, out: Tensor) -> None:
    """Q4_K and Q5_K: scale and minimum of 8 groups, 6 bits each, packed in 12 bytes."""
    low, high, both = (blocks[:, first : first + 4] for first in (4, 8, 12))
    scales = torch.cat([low & 63, (both & 15) | ((low >> 2) & 48)], 1)
    least = torch.cat([high & 63, (both >> 4) | ((high >> 2) & 48)], 1)
    groups = out.view(len(out), 8, 32)
    groups.mul_((_half(blocks, 0) * scales).unsqueeze(2))
    groups.sub_((_half(blocks, 2) * least).unsqueeze(2))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(blocks[:, 16:], 4))
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles(blocks[:, 48:], 4)
    out.copy_(codes.bitwise_or_(_fields(blocks[:, 16:48], 1).view(codes.shape)))
    _scale_and_shift(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles(blocks[:, :128], 2)
    high = [_fields(blocks[:, first : first + 32], 2) for first in (128, 160)]
    codes.bitwise_or_(torch.cat(high, 1).view(codes.shape))
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.copy_(codes).sub_(32).view(len(out), 16, 16).mul_(scales.unsqueeze(2))


#: Kind -> the function that writes its values.
WIDENED: Mapping[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "Q8_0": _q8_0,
}  # fmt: skip
