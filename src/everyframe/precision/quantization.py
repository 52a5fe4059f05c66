"""Quantization: linear layers with int8 or fp8 weights and one scale per row.

Replaces plain `nn.Linear` layers from outside. Each call widens the weights to the compute dtype
and multiplies as usual, so every device that has the wide dtype can run it, and only the weights
are rounded; `quantized_products` multiplies in eight bits, where that is asked for. Values and
scales equal torchao's bit for bit (pytorch/ao 0.18, Int8Tensor and Float8Tensor by rows). They are
plain tensors, as torchao's subclasses report the size of the unquantized weight and lack the
operations that offloading copies with. `everyframe.runtime.loading` quantizes while reading files;
`everyframe.planning.component_precision` decides when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.core.quality import PRODUCTS
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.islands import is_in_island
from everyframe.precision.quantized_products import can_multiply, multiply

#: Name of a layer's scales, beside `weight` and `bias`.
SCALE = "weight_scale"

#: Layers of LoRAs, as peft names them, and the projection of IP adapters in a UNet.
_ADAPTERS = ("*.lora_*", "encoder_hid_proj")

#: Elements rounded at once; the temporary memory is small on any device.
_AT_ONCE = 1 << 22


def storage_of(kind: str) -> str:
    """How weights of a kind are stored: ``int8`` or ``fp8``."""
    return PRODUCTS.get(kind, kind)


class QuantizedLinear(nn.Module):
    """``x W^T + b`` with W in eight bits.

    Attributes:
        kind: ``int8`` or ``fp8`` (float8_e4m3fn), or one of `PRODUCTS`.
        is_plain: set by a repair that wants plain kernels; None where there are no others.
        weight_scale: (out, 1) in the compute dtype. It is the first parameter: models cast their
            inputs to the dtype of a submodule's first one, as Wan does with its time embedding.
        weight: (out, in) int8; for fp8 its bits, so that casts of floating parameters skip it.
        bias: (out) in the compute dtype, or None.
    """

    def __init__(self, kind: str, weight: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.kind = kind
        self.is_plain = False if kind in PRODUCTS else None
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias

    @property
    def in_features(self) -> int:
        """Input channels."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Output channels."""
        return self.weight.shape[0]

    def wide(self) -> Tensor:
        """Dequantize W (out, in) to the dtype of the scales, which holds every code exactly."""
        is_int8 = storage_of(self.kind) == "int8"
        values = self.weight if is_int8 else self.weight.view(torch.float8_e4m3fn)
        # Before the product: sums of unscaled values would overflow float16.
        return values.to(self.weight_scale.dtype).mul_(self.weight_scale)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if self.is_plain is False and can_multiply(self.kind, input, self.weight):
            return multiply(self.kind, input, self.weight, self.weight_scale, self.bias)
        return F.linear(input, self.wide(), self.bias)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        given = state.get(f"{prefix}weight")
        if given is not None and given.is_floating_point():
            # torch would cut them to whole numbers, and without `strict` say nothing.
            rest[-1].append(f"{prefix}weight is quantized; load weights before everyframe.quantize")
            return
        super()._load_from_state_dict(state, prefix, *rest)

    def extra_repr(self) -> str:
        """Sizes and kind, as `nn.Linear` shows them."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, kind={self.kind}"


def in_memory(module: nn.Module, kind: str) -> Precision:
    """The precision of a loaded module in its most frequent dtype, with weights of that kind.

    What is in another dtype stays: the layers that a library loads in float32, as T5's ``wo``. So
    do adapters, which are small. The code of both casts inputs to the dtype of their weights.
    """
    sizes: Counter[torch.dtype] = Counter()
    for each in module.parameters():
        sizes[each.dtype] += each.numel()
    own = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    others = tuple(name for name, each in module.named_parameters() if each.dtype != own)
    return Precision(dtype_name(own), dtype_name(own), (*_ADAPTERS, *others), weight_dtype=kind)


def layers(module: nn.Module, precision: Precision | None) -> dict[str, nn.Linear]:
    """Linear layers of a module that this precision quantizes, by name.

    Every plain linear layer outside of islands, except those with a shared weight.
    """
    if precision is None or not precision.weight_dtype:
        return {}
    named = module.named_parameters(remove_duplicate=False)
    owners = Counter(id(parameter) for _, parameter in named)
    return {
        name: part
        for name, part in module.named_modules()
        if name
        and type(part) is nn.Linear
        and owners[id(part.weight)] == 1
        and not is_in_island(f"{name}.weight", precision.islands)
    }


def rows(module: nn.Module, precision: Precision | None) -> dict[str, int]:
    """Quantized weights by name, with the number of scales of each."""
    return {f"{name}.weight": each.out_features for name, each in layers(module, precision).items()}


def swap(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replace the child of that name by `layer`; returns the old child."""
    parent, _, own = name.rpartition(".")
    holder = module.get_submodule(parent)
    before = holder.get_submodule(own)
    setattr(holder, own, layer)
    return before


def without_numbers(linear: nn.Linear, kind: str) -> QuantizedLinear:
    """Quantized replacement of a layer, on meta except for its bias."""
    weight = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device="meta")
    return QuantizedLinear(kind, weight, scale, linear.bias)


@contextmanager
def as_quantized(module: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Context: a meta module has the layers and parameters that it has when loaded quantized."""
    kind = "" if precision is None else precision.weight_dtype
    before = {
        name: swap(module, name, without_numbers(linear, kind))
        for name, linear in layers(module, precision).items()
    }
    try:
        yield
    finally:
        for name, linear in before.items():
            swap(module, name, linear)


def save_wide(layer: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """Hook of `state_dict`: the weight that a layer computes with, by the name that it had.

    Other libraries read the codes as if they were the weight.
    """
    assert isinstance(layer, QuantizedLinear)
    state[f"{prefix}weight"] = layer.wide()
    del state[f"{prefix}{SCALE}"]


def quantize_layers(module: nn.Module, precision: Precision) -> None:
    """Quantize the layers of a loaded module in place, on their device."""
    for name, linear in layers(module, precision).items():
        device = linear.weight.device
        values, scale = quantize(linear.weight.detach(), precision.weight_dtype, device)
        scale = scale.to(linear.weight.dtype)  # that of its products
        swap(module, name, QuantizedLinear(precision.weight_dtype, values, scale, linear.bias))


def quantize(weight: Tensor, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Quantize a weight: values (out, in) int8 and scales (out, 1) float32, on `device`.

    Rows are processed in batches, so a weight from the host is never whole on the device.
    """
    rounded = _ROUNDINGS[storage_of(kind)]
    values = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=device)
    step = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        values[part], scale[part] = rounded(weight[part].to(device, torch.float32))
    return values, scale


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric rounding: a row's largest magnitude maps to 127.5, midway between int8's ends."""
    scale = _divide(_largest(rows), 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (rows * (1 / scale)).round().clamp(-128, 127).to(torch.int8), scale


def _to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A row's largest magnitude maps to float8_e4m3fn's largest; returns the bits as int8."""
    most = torch.finfo(torch.float8_e4m3fn).max
    # Avoids division by zero for rows of zeros.
    scale = _divide(_largest(rows).clamp(min=1e-12), most)
    return (rows / scale).clamp(-most, most).to(torch.float8_e4m3fn).view(torch.int8), scale


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1, keepdim=True)


def _divide(x: Tensor, number: float) -> Tensor:
    """Divide with IEEE 754 rounding.

    CUDA divides by a Python number as a product with its reciprocal. If the scale is then one bit
    off, the largest value of a row, midway between two codes, rounds to the other one.
    """
    return x / x.new_full((), number)


_ROUNDINGS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": _to_int8,
    "fp8": _to_fp8,
}
