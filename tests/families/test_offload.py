"""Offloaded weights give the same bits, and no more than they should is on the device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_models
import tiny
from everyframe.core.plan import Precision
from everyframe.families import offload
from everyframe.precision import edges

WIDE = Precision("float32", "float32")


class Block(nn.Module):
    """A block with a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8))
        self.inner = nn.Linear(8, 8)
        self.text = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert all(p.is_contiguous() for p in self.parameters())
        out: Tensor = self.inner(x) * self.table
        return out


class Model(nn.Module):
    """Blocks of which one layer is called from outside of them, as texts are projected."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        texts = [block.text(x) for block in self.blocks]
        for block, text in zip(self.blocks, texts, strict=True):
            x = block(x) + text
        return x * self.scale


def test_units_are_the_blocks() -> None:
    names = set(offload.units(Model(12)))
    assert names == {f"blocks.{i}" for i in range(12)}
    # Parts that are too large come in pieces; what is no layer's stays.
    assert "blocks.0.inner" in offload.units(Model(2))


def test_resident_bytes_are_those_of_the_largest_unit_and_what_is_no_units() -> None:
    model = Model(12)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    assert offload.resident_bytes(model, WIDE) == block + model.scale.nbytes
    put_on = offload.apply(model, "cpu")
    model(torch.randn(2, 8))
    assert put_on.most_bytes == block


def test_the_same_bits_and_the_weights_go_back() -> None:
    torch.manual_seed(0)
    model, x = Model(12), torch.randn(2, 8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = model(x)
    waiting = {id(p) for p in model.blocks.parameters()}
    put_on = offload.apply(model, "cpu")
    for _ in range(2):
        assert torch.equal(model(x), expected)
    # The very same tensors wait on the host again.
    assert {id(p) for p in model.blocks.parameters()} == waiting
    put_on.remove()
    put_on.remove()
    assert torch.equal(model(x), expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_failing_block_lets_its_weights_go() -> None:
    model = Model()
    put_on = offload.apply(model, "cpu")
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.randn(2, 9))
    assert put_on._on_host == {}
    assert put_on._now == 0


def ready(model: Any, component: str, dtype: str) -> Any:
    """A component of a family with random weights, in a precision, on the CPU."""
    module = model.rehearsals(small_models.settings(32, 32, 4))
    module = next(each for each in module if each.component == component).module()
    module = module.to_empty(device="cpu").requires_grad_(False)
    state = tiny.randomised(module, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(state[name])
    islands = () if dtype == "float32" else needs(model, component).islands
    edges.apply(module, Precision(dtype, dtype, islands))
    return module


def needs(model: Any, component: str) -> Any:
    parts = model.components(small_models.settings(32, 32, 4))
    return next(each.needs for each in parts if each.name == component)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_denoiser_of_opensora_gives_the_same_bits(dtype: str) -> None:
    model = ready(small_models.opensora("1.2"), "denoiser", dtype)
    torch.manual_seed(0)
    x, text = torch.randn(1, 4, 2, 4, 4), torch.randn(1, 24, 16)

    def answer() -> Tensor:
        out: Tensor = model(
            x, torch.tensor([500.0]), model.context(text), fps=24.0, height=32.0, width=32.0
        )
        return out

    with torch.no_grad():
        expected = answer()
        put_on = offload.apply(model, "cpu")
        assert torch.equal(answer(), expected)
    assert 0 < put_on.most_bytes < sum(p.nbytes for p in model.parameters()) / 2


def test_an_offloaded_unet_of_svd_gives_the_same_bits() -> None:
    model = ready(small_models.svd(), "unet", "float32")
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8, 8)

    def answer() -> Tensor:
        context = model.context(torch.ones(1, 16), torch.ones(1, 3), num_frames=4)
        out: Tensor = model(x, torch.tensor([1.0]), context)
        return out

    with torch.no_grad():
        expected = answer()
        put_on = offload.apply(model, "cpu")
        assert torch.equal(answer(), expected)
    assert put_on.most_bytes < sum(p.nbytes for p in model.parameters()) / 3


def test_it_makes_no_cycle_of_the_module() -> None:
    model = Model()
    offload.apply(model, "cpu")
    model(torch.randn(2, 8))
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
