"""Trials of attention: its kernels on the sizes of a component, in a separate process.

`trials` has the others; operands have fewer heads where they are large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.core.facts import OpShape
from everyframe.fast_paths.benchmark import Comparison
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.certification.trials import (
    ALLOWED,
    heaviest,
    modules,
    operations_of_a_trial,
    sizes_of,
)
from everyframe.fast_paths.modules.diffusers_attention import is_attention
from everyframe.fast_paths.registry import FastPath, kernel_of
from everyframe.ops.attention import PLAIN, by_kernel, supports_inputs
from everyframe.ops.native import kernels
from everyframe.precision.dtypes import torch_dtype

#: Unscaled attention scores of such queries and keys exceed float16's 65504.
_BEYOND_HALF = 7.5e4

#: Bytes of a score in the formulas that write all of them out, and the share of the free memory
#: that these may take. With fewer scores than the last number a card has not enough to do.
_SCORE_BYTES, _MEMORY_SHARE, _FEWEST_SCORES = 16, 0.5, 2.0**27


def attention(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare each attention of the component by that kernel with torch's plain kernel.

    The yardstick is the formula in the same precision. For half precision, large keys as in some
    models are tried too, on which half precision accumulation overflows.
    """
    kernel = kernel_of(path.name)
    assert kernel is not None
    left_out, number = [], 0
    for number, (product, weight) in enumerate(heaviest(subject, "attention")):
        q, k, v, mask, cut = _operands(product, subject)
        if not supports_inputs(kernel, q, k, v, mask):
            left_out.append(sizes_of(product))  # the next kernel does it, the plain one at last
            continue
        name = f"attention of {sizes_of(product)} in {product.dtype}"
        given = (q, k, v, mask)
        yield Comparison(
            name,
            truth=partial(_attend, PLAIN, *_wide(given)),
            plain=partial(_attend, PLAIN, *given),
            fast=partial(_attend, kernel, *given),
            yardstick=partial(_formula, *given),
            weight=weight * cut,
        )
        if number == 0 and product.dtype in ALLOWED:
            large = (*_large(q, k), v, mask)
            yield Comparison(
                f"{name} with large keys",
                truth=partial(_attend, PLAIN, *_wide(large)),
                plain=partial(_attend, PLAIN, *large),
                fast=partial(_attend, kernel, *large),
                yardstick=partial(_formula, *large),
                weight=0,
            )
    if left_out and len(left_out) == number + 1:
        raise RuntimeError(f"torch has no such kernel here for attention of {left_out[0]}")


def native(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare the kernel in C with torch's attention in blocks.

    Modules of ours are compared as they are. Those of diffusers can't have fewer rows, as the
    rotations that they are given belong to places; their attention alone is compared.
    """
    if not any(is_attention(part) for call in subject.calls for part in call.module().modules()):
        yield from modules(subject, path)
        return
    rival = next(kernel for each in path.rivals if (kernel := kernel_of(each)))
    num_tried = 0
    for product, weight in heaviest(subject, "attention"):
        q, k, v, mask, cut = _operands(product, subject)
        if (
            mask is not None
            or not kernels.supports_attention(q, k, v)
            or not supports_inputs(rival, q, k, v)
        ):
            continue
        num_tried += 1
        yield Comparison(
            f"attention of {sizes_of(product)} in {product.dtype}",
            truth=partial(_attend, PLAIN, *_wide((q, k, v, None))),
            plain=partial(_attend, rival, q, k, v, None),
            fast=partial(_in_c, q, k, v),
            yardstick=partial(_formula, q, k, v, None),
            weight=weight * cut,
        )
    if not num_tried:
        raise RuntimeError("no attention here suits the kernel: all have masks, or other dtypes")


def _in_c(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernels.attention(q, k, v, q.shape[-1] ** -0.5).transpose(1, 2)


def _operands(
    product: OpShape, subject: CertificationTarget
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """Queries, keys, values and mask with fewer rows, and the inverse of the trial's FLOPs.

    The plain ways write all scores out. Where those of one head would not fit into the memory,
    there are fewer queries, too.
    """
    (batch, heads, length, size), (*_, keys, _), (*_, width) = product.shapes
    free = subject.device.free_memory
    most_scores = max(_MEMORY_SHARE * free / _SCORE_BYTES, _FEWEST_SCORES)
    length = max(1, min(length, int(most_scores / keys)))
    each = 2.0 * length * keys * (size + width)
    most_rows = min(operations_of_a_trial(subject) / each, most_scores / (length * keys))
    rows = max(1, min(batch * heads, int(most_rows)))
    heads = min(heads, rows)
    batch = max(1, rows // heads)
    device, dtype = subject.device.torch_name, torch_dtype(product.dtype)
    generator = torch.Generator().manual_seed(0)

    def heads_of(tokens: int, channels: int) -> Tensor:
        # As a projection leaves them: heads side by side in a token.
        x = torch.randn(batch, tokens, heads, channels, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    mask = None
    if product.parameters:
        mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
        mask[..., keys - keys // 4 :] = False
    q, k, v = heads_of(length, size), heads_of(keys, size), heads_of(keys, width)
    return q, k, v, mask, 1 / (batch * heads * each)


def _attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with by_kernel(kernel, strictly=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention written out in the operands' dtype, with the softmax in float32."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    out: Tensor = scores.float().softmax(-1).to(v.dtype) @ v
    return out


def _large(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with a common sign pattern, whose products exceed half precision."""
    size = (_BEYOND_HALF / q.shape[-1]) ** 0.5
    signs = q[:1, :1, :1].sign() * size
    return (0.1 * q + signs).to(q.dtype), (0.1 * k + signs).to(k.dtype)


def _wide(given: Sequence[Tensor | None]) -> list[Any]:
    return [
        each.float() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in given
    ]
