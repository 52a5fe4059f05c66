"""Products of linear layers in eight bits by torchao, of weights as `quantization` stores them.

Activations are rounded at each call, one scale a row: to int8 for integer products, to
float8_e4m3fn for the scaled products of cards since SM89. Lossy; a plan uses them where a trial on
this device shows them right and faster (`fast_paths.certification.trials`). Modules in memory have
them by `dynamic_quantization`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.core.errors import MissingPackageError

#: Scaled products of fp8 exist for multiples of this size, and bfloat16 results.
_FP8_MULTIPLE = 16


def torchao(kind: str) -> Any:
    """The package ``torchao.quantization``.

    Raises:
        MissingPackageError: it isn't installed.
    """
    try:
        from torchao import quantization
    except ImportError as error:
        raise MissingPackageError(
            f"{kind} needs torchao: pip install 'everyframe[torchao]'"
        ) from error
    return quantization


def can_multiply(kind: str, x: Tensor, codes: Tensor) -> bool:
    """Whether there is such a product of this input; otherwise the weights are widened."""
    if x.numel() == 0 or x.device.type == "meta":
        return False
    is_multiple = not any(size % _FP8_MULTIPLE for size in codes.shape)
    return kind == "int8-dynamic" or (x.dtype == torch.bfloat16 and is_multiple)


def multiply(kind: str, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` with W of `codes` (out, in) int8 and `scale` (out, 1), in the dtype of `x`."""
    rows = {"block_size": [1, codes.shape[1]], "dtype": x.dtype, **_options(kind)}
    if kind == "int8-dynamic":
        found = torchao(kind).Int8Tensor(
            codes.detach(), scale.detach().float(), **rows,
            zero_point=torch.zeros(len(codes), 1, dtype=torch.int8, device=codes.device),
        )  # fmt: skip
    else:
        values = codes.detach().view(torch.float8_e4m3fn)
        found = torchao(kind).Float8Tensor(values, scale.detach().float(), **rows)
    return F.linear(x, found, bias)


@cache
def _options(kind: str) -> dict[str, Any]:
    """How activations are rounded, as torchao's own configs have it."""
    by_row = torchao(kind).PerRow()
    if kind == "int8-dynamic":
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import (
            QuantizeTensorToInt8Kwargs,
        )

        return {"act_quant_kwargs": QuantizeTensorToInt8Kwargs(granularity=by_row)}
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        QuantizeTensorToFloat8Kwargs,
    )

    return {
        "act_quant_kwargs": QuantizeTensorToFloat8Kwargs(granularity=by_row),
        "mm_config": Float8MMConfig(use_fast_accum=True),
    }
