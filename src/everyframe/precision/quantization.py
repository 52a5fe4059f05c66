"""Linear layers that keep their weights in eight bits: a value an element and a scale a row.

Swapped in from outside for plain `nn.Linear` layers. At each call the weights are widened to the
precision of the rest and multiplied as always, so every device that has the wide dtype can do it,
and nothing but the rounding of the weights is lost. Values and scales are torchao's, bit for bit
(pytorch/ao 0.18, Int8Tensor and Float8Tensor by rows); but plain tensors, not its subclasses, which
tell their bytes as if they were whole and lack what offloading copies with. Not here: reading
weights from files in this form (`everyframe.runtime.loading`), and when it is done
(`everyframe.planning.component_precision`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.precision.islands import in_island

#: The name of a layer's scales, beside `weight` and `bias`.
SCALE = "weight_scale"

#: So many elements are rounded at once: what that takes beside them is small on any device.
_AT_ONCE = 1 << 22


class QuantisedLinear(nn.Module):
    """``x W^T + b``, W in eight bits; `kind` is ``int8`` or ``fp8`` (float8_e4m3fn).

    Parameters: `weight` (out, in), int8 whatever the kind (of fp8 the bits, so that whoever casts
    floating parameters leaves them alone); `weight_scale` (out, 1) and `bias` (out) in the dtype
    that the layer computes in.
    """

    def __init__(self, kind: str, weight: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    @property
    def in_features(self) -> int:
        """Channels that it takes."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Channels that it gives."""
        return self.weight.shape[0]

    def wide(self) -> Tensor:
        """W (out, in) in the dtype of the scales, which holds every value exactly."""
        values = self.weight if self.kind == "int8" else self.weight.view(torch.float8_e4m3fn)
        # Before the product: sums of values that are not scaled yet would overflow float16.
        return values.to(self.weight_scale.dtype).mul_(self.weight_scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.wide(), self.bias)

    def extra_repr(self) -> str:
        """Sizes and kind, as `nn.Linear` shows them."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, kind={self.kind}"


def layers(module: nn.Module, precision: Precision | None) -> dict[str, nn.Linear]:
    """The layers of a module that keep their weights in eight bits in that precision, by name.

    Every plain linear layer outside of islands; not such whose weight is somebody else's too.
    """
    if precision is None or not precision.weights:
        return {}
    named = module.named_parameters(remove_duplicate=False)
    owners = Counter(id(parameter) for _, parameter in named)
    return {
        name: part
        for name, part in module.named_modules()
        if name
        and type(part) is nn.Linear
        and owners[id(part.weight)] == 1
        and not in_island(f"{name}.weight", precision.islands)
    }


def rows(module: nn.Module, precision: Precision | None) -> dict[str, int]:
    """The weights that are kept in eight bits by name, and how many scales each has."""
    return {f"{name}.weight": each.out_features for name, each in layers(module, precision).items()}


def swap(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Put `layer` in the place of that child; gives what was there."""
    parent, _, own = name.rpartition(".")
    holder = module.get_submodule(parent)
    before = holder.get_submodule(own)
    setattr(holder, own, layer)
    return before


def without_numbers(linear: nn.Linear, kind: str) -> QuantisedLinear:
    """What takes the place of a layer, on meta but for its bias."""
    weight = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device="meta")
    return QuantisedLinear(kind, weight, scale, linear.bias)


@contextmanager
def as_quantised(module: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Within, a module on meta has the layers and parameters that it will have when loaded."""
    kind = "" if precision is None else precision.weights
    before = {
        name: swap(module, name, without_numbers(linear, kind))
        for name, linear in layers(module, precision).items()
    }
    try:
        yield
    finally:
        for name, linear in before.items():
            swap(module, name, linear)


def quantise_layers(module: nn.Module, precision: Precision) -> None:
    """Swap the layers of a module that has its weights, where they lie."""
    for name, linear in layers(module, precision).items():
        device = linear.weight.device
        values, scale = quantise(linear.weight.detach(), precision.weights, device)
        swap(module, name, QuantisedLinear(precision.weights, values, scale, linear.bias))


def quantise(weight: Tensor, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values (out, in) int8 and scales (out, 1) float32 of a weight, on `device`.

    Some rows at a time, each by itself; a weight that comes from the host is never whole there.
    """
    rounded = _ROUNDINGS[kind]
    values = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=device)
    step = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        values[part], scale[part] = rounded(weight[part].to(device, torch.float32))
    return values, scale


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric: the largest of a row is 127.5, the middle of what int8 reaches on both sides."""
    scale = _divided(_largest(rows), 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (rows * (1 / scale)).round().clamp(-128, 127).to(torch.int8), scale


def _to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of a row is float8_e4m3fn's largest; the bits of the values."""
    most = torch.finfo(torch.float8_e4m3fn).max
    # Rows of zeros are divided by something.
    scale = _divided(_largest(rows).clamp(min=1e-12), most)
    return (rows / scale).clamp(-most, most).to(torch.float8_e4m3fn).view(torch.int8), scale


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1, keepdim=True)


def _divided(x: Tensor, number: float) -> Tensor:
    """The quotient as IEEE 754 rounds it.

    By a plain number CUDA multiplies with its reciprocal instead; and where the scale is one bit
    off, the largest of a row, which is midway between two values, is rounded to the other.
    """
    return x / x.new_full((), number)


_ROUNDINGS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": _to_int8,
    "fp8": _to_fp8,
}
