"""Weights in eight bits are torchao's, and a layer that has them is the product with those weights.

The golden was made by torchao 0.18; see its README.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from everyframe.core.plan import Precision
from everyframe.numerics.fault_locator import bad_weights, locate_fault
from everyframe.planning.component_precision import ERRORS
from everyframe.precision import cast_hooks, quantization
from everyframe.precision.quantization import (
    QuantizedLinear,
    as_quantized,
    layers,
    quantize,
    quantize_layers,
    rows,
)
from everyframe.precision.upcast import Upcast

GOLDEN = Path(__file__).parents[1] / "golden" / "eight_bits_torchao" / "io.safetensors"
CPU = torch.device("cpu")
KINDS = ("int8", "fp8")


def linear(out: int = 96, channels: int = 128, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(channels, out, bias=bias).requires_grad_(False)


def of(layer: nn.Linear, kind: str) -> QuantizedLinear:
    values, scale = quantize(layer.weight, kind, CPU)
    return QuantizedLinear(kind, values, scale, layer.bias)


def wide64(layer: QuantizedLinear) -> torch.Tensor:
    """The weight that it stands for, in float64 and by another way."""
    values = layer.weight if layer.kind == "int8" else layer.weight.view(torch.float8_e4m3fn)
    return values.to(torch.float64) * layer.weight_scale.to(torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_scales_are_torchao_s(kind: str) -> None:
    golden = load_file(GOLDEN)
    for name in ("float32", "bfloat16"):
        values, scale = quantize(golden[f"{name}.weight"], kind, CPU)
        assert torch.equal(values, golden[f"{name}.{kind}.values"])
        assert torch.equal(scale, golden[f"{name}.{kind}.scale"])
        layer = QuantizedLinear(kind, values, scale, None)
        assert torch.equal(layer.wide(), golden[f"{name}.{kind}.wide"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rounded_by_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = linear().weight
    weight[3] *= 1000
    weight[5] = 0
    whole = quantize(weight, kind, CPU)
    monkeypatch.setattr(quantization, "_AT_ONCE", 300)  # two rows
    assert all(map(torch.equal, quantize(weight, kind, CPU), whole))
    monkeypatch.setattr(quantization, "_AT_ONCE", 1)  # less than a row
    assert all(map(torch.equal, quantize(weight, kind, CPU), whole))
    layer = QuantizedLinear(kind, *whole, None)
    assert torch.equal(layer.wide()[5], torch.zeros(128))
    assert layer.weight.nbytes == weight.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_with_the_rounded_weight(kind: str) -> None:
    """In float32 to its rounding; in half precisions the weight is rounded once more, as any is."""
    plain = linear()
    layer, x = of(plain, kind), torch.randn(4, 128)
    expected = F.linear(x.double(), wide64(layer), plain.bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-5)
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        narrow = layer.to(dtype)
        assert narrow.weight.dtype == torch.int8  # casting parameters leaves values alone
        assert torch.equal(narrow.wide(), (wide64(narrow)).to(dtype))
        torch.testing.assert_close(narrow(x.to(dtype)).double(), expected, rtol=0, atol=limit)
        layer = of(plain, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_in_float16_stay_finite(kind: str) -> None:
    """Values before they are scaled are as large as 448, and a sum of them is beyond 65504."""
    plain = nn.Linear(1024, 2, bias=False).requires_grad_(False)
    plain.weight.fill_(0.01)
    layer, x = of(plain, kind).to(torch.float16), torch.full((1, 1024), 3.0, dtype=torch.float16)
    torch.testing.assert_close(layer(x), torch.full((1, 2), 30.72).half(), rtol=5e-3, atol=0)
    scaled_late = F.linear(x, layer.wide() / layer.weight_scale) * layer.weight_scale[:, 0]
    assert not torch.isfinite(scaled_late).any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_as_large_as_plans_say(kind: str) -> None:
    """Of weights without outliers; not much less either, or the plan would frighten for nothing."""
    torch.manual_seed(1)
    plain = nn.Linear(2048, 512, bias=False).requires_grad_(False)
    nn.init.normal_(plain.weight, std=0.02)
    x = torch.randn(16, 2048)
    error = (of(plain, kind)(x) - plain(x)).norm() / plain(x).norm()
    assert ERRORS[kind] / 2 < error < ERRORS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_it_is_found_and_mended_as_in_any_layer(kind: str) -> None:
    """A sum beyond float16: the module is named, and in float32 it is finite."""
    plain = nn.Linear(64, 8, bias=False).requires_grad_(False)
    plain.weight.fill_(30.0)
    net = nn.Sequential(of(plain, kind)).to(torch.float16)
    x = torch.full((1, 64), 60.0, dtype=torch.float16)
    fault = locate_fault({"net": net}, lambda: net(x)).fault
    assert fault is not None
    assert (fault.place, fault.cause, fault.dtype) == ("net.0", "range", torch.float16)
    raised = Upcast(net[0], torch.float32)
    assert locate_fault({"net": net}, lambda: net(x)).fault is None
    torch.testing.assert_close(net(x), torch.full((1, 8), 64 * 30.0 * 60), rtol=1e-2, atol=0)
    raised.undo()
    assert bad_weights({"net": net}) == []
    # Weights that are no numbers stay so, and are reported.
    plain.weight[2, 3] = torch.nan
    broken = nn.Sequential(of(plain, kind))
    assert "net.0.weight_scale" in [name for name, _ in bad_weights({"net": broken})]


class Net(nn.Module):
    """What is quantized and what is not: an island, shared weights, other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(linear(8, 8), nn.GELU()) for _ in range(2)])
        self.first, self.last = linear(8, 8), linear(8, 8)
        self.twice = linear(8, 8)
        self.again = self.twice
        self.tied, self.table = linear(8, 8), nn.Embedding(8, 8)
        self.tied.weight = self.table.weight
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


PRECISION = Precision("bfloat16", "bfloat16", ("last",), "int8")


def test_which_layers_are_quantized() -> None:
    net = Net()
    assert list(layers(net, PRECISION)) == ["blocks.0.0", "blocks.1.0", "first"]
    assert rows(net, PRECISION)["first.weight"] == 8
    assert layers(net, None) == layers(net, Precision("bfloat16", "bfloat16")) == {}


def test_for_a_dry_run_a_module_has_them_and_gets_its_own_back() -> None:
    net = Net().to("meta")
    before = dict(net.named_parameters())
    with as_quantized(net, PRECISION):
        part = net.get_submodule("blocks.0.0")
        assert isinstance(part, QuantizedLinear)
        assert (part.weight.dtype, part.weight.device.type) == (torch.int8, "meta")
        assert type(net.last) is nn.Linear
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_precision_is_put_on_and_raised_as_on_any_layer(kind: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    expected = net(x)
    precision = Precision("bfloat16", "bfloat16", ("last",), kind)
    quantize_layers(net, precision)
    cast_hooks.add_cast_hooks(net, precision)
    part = net.get_submodule("blocks.0.0")
    assert part.weight.dtype == torch.int8
    assert part.weight_scale.dtype == part.bias.dtype == torch.bfloat16
    assert part(x).dtype == torch.bfloat16
    narrow = (net(x) - expected).abs().max()
    assert 0 < narrow < 0.1
    raised = Upcast(net.blocks, torch.float32)
    assert part(x).dtype == torch.float32
    assert part.weight.dtype == torch.int8
    raised.undo()
    assert (net(x) - expected).abs().max() == narrow
