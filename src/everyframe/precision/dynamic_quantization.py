"""Products in eight bits by torchao, where a layer of that size is right and faster so.

Activations are rounded at each call: int8 per token for integer products, fp8 per row for the
scaled products of cards since SM89. This is lossy; the error of each layer size is measured with
made-up numbers as large as a trained model's. Weight-only quantization, which needs no torchao, is
in `quantization`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.hardware.throughput import wait_for_device
from everyframe.precision.plain_tensors import is_plain
from everyframe.precision.policy import FP8_CAPABILITY
from everyframe.precision.quantization import in_memory, layers
from everyframe.precision.quantized_products import torchao

#: Allowed error of a quantized product; int8 and fp8 were measured at 0.7 to 3 %.
_LIMIT = 5e-2

#: Smallest gain, and rows and rounds with which a layer is timed.
_LEAST_GAIN, _ROWS, _ROUNDS = 1.03, 1024, 5


def is_quantized(module: nn.Module) -> bool:
    """Whether this is a linear layer whose weight is torchao's."""
    return isinstance(module, nn.Linear) and not is_plain(module.weight)


def quantize_products(module: nn.Module, kind: str) -> Iterator[str]:
    """Quantize linear layers in place; yield a note for each layer size that stays as it is.

    Raises:
        InputError: this device has no such product.
        MissingPackageError: torchao isn't installed.
    """
    quantize_, config = _torchao(kind)
    found = layers(module, in_memory(module, "int8"))
    device = next(module.parameters()).device
    if kind == "fp8-scaled" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY
    ):
        raise InputError("fp8-scaled needs a card of compute capability 8.9 or later; try fp8")
    by_size: dict[tuple[int, ...], list[nn.Linear]] = {}
    for layer in found.values():
        by_size.setdefault(tuple(layer.weight.shape), []).append(layer)
    for size, alike in by_size.items():
        why_not = _why_not(alike[0], quantize_, config)
        if why_not is not None:
            yield f"{len(alike)} layers of {size[1]} to {size[0]} stay as they are: {why_not}"
            continue
        for layer in alike:
            quantize_(layer, config)


def _torchao(kind: str) -> tuple[Any, Any]:
    quantization = torchao(kind)
    config = (
        quantization.Int8DynamicActivationInt8WeightConfig()
        if kind == "int8-dynamic"
        else quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow()
        )
    )
    return quantization.quantize_, config


@torch.no_grad()
def _why_not(layer: nn.Linear, quantize_: Any, config: Any) -> str | None:
    """Why a layer of that size is better left; None if quantizing it is right and faster."""
    weight = layer.weight
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_ROWS, layer.in_features, generator=generator, device="cpu")
    x = x.to(weight.device, weight.dtype)
    narrow = copy.deepcopy(layer)
    try:
        quantize_(narrow, config)
        got = narrow(x)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return " ".join(str(error).split())[:120] or type(error).__name__
    true = copy.deepcopy(layer).float()(x.float())
    off = float((got.float() - true).norm() / true.norm())
    if not off <= _LIMIT:
        return f"off by {off:.1%}"
    times: dict[nn.Module, list[float]] = {layer: [], narrow: []}
    for _ in range(_ROUNDS):
        for each, taken in times.items():
            taken.append(_seconds(each, x))
    gain = statistics.median(times[layer]) / statistics.median(times[narrow])
    return None if gain >= _LEAST_GAIN else f"no faster than the plain product ({gain:.2f}x)"


def _seconds(layer: nn.Module, x: Tensor) -> float:
    began = time.perf_counter()
    layer(x)
    wait_for_device(str(x.device))
    return time.perf_counter() - began
