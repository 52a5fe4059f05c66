"""Modules in memory are quantized in place, and what is no gain is left with a note."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel

import everyframe
from everyframe.core.errors import EveryframeWarning, InputError, MissingPackageError
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.precision import dynamic_quantization
from everyframe.precision.quantization import QuantizedLinear
from helpers.compiled_blocks import Model, inputs, made
from helpers.planted_compiler import PlantedCompiler


@torch.no_grad()
def relative(model: Model, other: Model) -> float:
    x = inputs()
    true = other(*x)
    return float((model(*x) - true).norm() / true.norm())


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.03), ("fp8", 0.15)])
def test_weights_are_stored_in_eight_bits(kind: str, limit: float) -> None:
    model = made()
    assert everyframe.quantize(model, kind) is model
    layers = [part for part in model.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) == 4
    assert all(layer.weight.dtype == torch.int8 for layer in layers)
    # Half a step of seven and of three bits a layer, through two blocks of layers of sixteen.
    assert 1e-5 < relative(model, made()) < limit
    with pytest.raises(InputError, match="is quantized already"):
        everyframe.quantize(model, kind)


def test_a_layer_is_tried_on_its_own_device() -> None:
    """As after ``torch.set_default_device("cuda")``: the numbers are drawn on the host."""
    layer = torch.nn.Linear(16, 8).requires_grad_(False)
    with torch.device("meta"):
        why_not = dynamic_quantization._why_not(layer, lambda *_: None, None)
    # The same layer is as fast as itself, but for the noise of five rounds.
    assert why_not is None or "no faster" in why_not


def test_half_precision_stays_half_precision() -> None:
    model = everyframe.quantize(made().to(torch.bfloat16))
    x, text = inputs()
    with torch.no_grad():
        out = model(x.bfloat16(), type(text)(text.keys.bfloat16()))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_librarys_model_saves_what_the_library_reads(kind: str, tmp_path: Path) -> None:
    """It took the codes for weights, and made noise of them without a word."""
    sizes: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 1,
                             "attention_head_dim": 8, "cross_attention_dim": 8, "num_layers": 1,
                             "caption_channels": 8}  # fmt: skip
    model = everyframe.quantize(LTXVideoTransformer3DModel(**sizes), kind)
    assert isinstance(model.proj_in, QuantizedLinear)
    model.save_pretrained(tmp_path)
    again = LTXVideoTransformer3DModel.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(LTXVideoTransformer3DModel(**sizes).state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(again.get_submodule(name).weight, layer.wide())


def test_weights_are_not_loaded_as_codes() -> None:
    model = everyframe.quantize(made())
    codes = model.get_submodule("blocks.0.linear").weight
    before = codes.clone()
    with pytest.raises(RuntimeError, match=r"load weights before everyframe\.quantize"):
        model.load_state_dict(made(1).state_dict(), strict=False)
    assert torch.equal(codes, before)


def test_kinds_are_named() -> None:
    with pytest.raises(InputError, match="kind must be one of int8, fp8, int8-dynamic, fp8-scaled"):
        everyframe.quantize(made(), "int7")
    with pytest.raises(InputError, match="a module or a diffusers pipeline is needed, got 'model'"):
        everyframe.quantize("model")


def test_a_missing_package_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'everyframe\[torchao\]'"):
        everyframe.quantize(made(), "int8-dynamic")


class Halved:
    """In place of torchao: `quantize_` halves a weight, which is a large error."""

    @staticmethod
    def quantize_(layer: torch.nn.Linear, config: float) -> None:
        layer.weight = torch.nn.Parameter(layer.weight * config, requires_grad=False)


@pytest.mark.parametrize(
    ("factor", "gain", "says"),
    [(0.5, 2.0, "off by"), (1.0, 0.5, "no faster than the plain product"), (1.0, 2.0, "")],
)
def test_only_what_is_right_and_faster_is_quantized(
    factor: float, gain: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_quantization, "_torchao", lambda _: (Halved.quantize_, factor))
    times = iter([gain, 1.0] * 100)
    monkeypatch.setattr(dynamic_quantization, "_seconds", lambda *_: next(times))
    model, plain = made(), made()
    before = model.blocks[0].linear.weight  # type: ignore[union-attr]
    if says:
        with pytest.warns(
            EveryframeWarning, match=f"4 layers of 16 to 16 stay as they are: {says}"
        ):
            everyframe.quantize(model, "int8-dynamic")
    else:
        everyframe.quantize(model, "int8-dynamic")
    is_left = model.blocks[0].linear.weight is before  # type: ignore[union-attr]
    assert is_left == bool(says)
    assert relative(model, plain) == 0.0


class Packed(torch.Tensor):
    """A weight of a quantizer's class."""


def test_no_lora_is_fused_into_layers_that_multiply_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended in an error of torchao's about an operation that it lacks."""
    peft = pytest.importorskip("peft", reason="diffusers loads LoRAs with it")

    def pack(layer: torch.nn.Linear, _: object) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Packed), False)

    monkeypatch.setattr(dynamic_quantization, "_torchao", lambda _: (pack, None))
    monkeypatch.setattr(dynamic_quantization, "_why_not", lambda *_: None)
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["linear"]), made())
    everyframe.quantize(model, "int8-dynamic")
    for block in model.blocks:
        assert type(block.linear.base_layer.weight) is Packed
        with pytest.raises(InputError, match=r"fuse it before everyframe\.quantize"):
            block.linear.merge()


def test_scaled_products_need_a_card() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(InputError, match=r"compute capability 8\.9"):
        everyframe.quantize(made(), "fp8-scaled")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao isn't installed")
def test_torchaos_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_quantization, "_LEAST_GAIN", 0.0)
    model = everyframe.quantize(made(), "int8-dynamic")
    assert sum(map(dynamic_quantization.is_quantized, model.modules())) == 4
    assert 1e-5 < relative(model, made()) < 0.05
    with pytest.raises(InputError, match="is quantized already"):
        everyframe.quantize(model, "int8")


def test_quantized_blocks_compile_and_take_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a LoRA that is merged into a layer before it is quantized again."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    compiler = PlantedCompiler(monkeypatch)
    model = everyframe.compile(everyframe.quantize(made()))
    want = everyframe.quantize(made())
    assert relative(model, want) < 1e-5
    assert all(block.report.packages for block in compiled_blocks(model).values())
    merged = made()
    for block in merged.blocks:
        block.linear.weight.data += 0.1  # type: ignore[union-attr]
    merged = everyframe.quantize(merged)
    assert relative(merged, want) > 0.01
    model.load_state_dict(merged.state_dict())
    assert relative(model, merged) < 1e-5
    assert compiler.count == 1
