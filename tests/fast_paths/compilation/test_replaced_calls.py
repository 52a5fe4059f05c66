"""Compiled blocks whose calls, or torch's attention, somebody replaces from outside."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

import everyframe
from everyframe.fast_paths.compilation.block_state import Description, StateWatch, describe
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from helpers.compiled_blocks import Block, Model, Processor, inputs, made
from helpers.planted_compiler import PlantedCompiler


@pytest.fixture(autouse=True)
def fixed_sizes(compiler: PlantedCompiler) -> None:
    """An export of dynamic sizes takes seconds."""
    compiler.is_dynamic = False


@torch.no_grad()
def result(model: Model) -> Tensor:
    out: Tensor = model(*inputs())
    return out


def own_processor(model: Model, patch: pytest.MonkeyPatch) -> None:
    """As those do it who set a function of theirs on a processor's class."""
    patch.setattr(Processor, "__call__", lambda self, x: x.cos() * self.gain)


def own_forward(model: Model, patch: pytest.MonkeyPatch) -> None:
    whole = Block.forward
    patch.setattr(Block, "forward", lambda *given, **named: whole(*given, **named) * 0.5)


def own_class(model: Model, patch: pytest.MonkeyPatch) -> None:
    """As token merging is put on: the module gets another class."""
    norm = nn.LayerNorm
    own = type("Norm", (norm,), {"forward": lambda self, x: norm.forward(self, x) * 3})
    for block in model.blocks:
        block.norm.__class__ = own  # type: ignore[assignment]


@pytest.mark.parametrize("change", [own_processor, own_forward, own_class])
def test_another_function_of_a_class_is_called(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, plain = everyframe.compile(made()), made()
    before = result(compiled)
    with monkeypatch.context() as patch:
        change(compiled, patch)
        change(plain, patch)
        after = result(compiled)
        assert float((before - after).abs().max()) > 0.01
        torch.testing.assert_close(after, result(plain), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(result(compiled), result(plain), rtol=2e-5, atol=2e-5)


def swing(x: Tensor) -> Tensor:
    return x.sin() * GAIN


GAIN = 2.0


class Helped(nn.Module):
    """Calls a function of its module and a method, and reads numbers of both."""

    shift = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(swing(x))

    def shifted(self, x: Tensor) -> Tensor:
        """As diffusers' attention modules prepare a mask."""
        return x + self.shift


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (sys.modules[__name__], "swing", torch.cos),
        (sys.modules[__name__], "swing", lambda x: x.cos()),
        (sys.modules[__name__], "swing", functools.partial(torch.mul, other=3.0)),
        (sys.modules[__name__], "swing", functools.cache(lambda x: x.cos())),
        (sys.modules[__name__], "GAIN", 3.0),
        (Helped, "shifted", lambda self, x: x - self.shift),
        (Helped, "shift", 0.5),
    ],
)
@torch.no_grad()
def test_what_a_block_finds_by_name_is_another(
    owner: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do it who set their own attention in a module of diffusers."""
    model, x = nn.Module(), torch.randn(3, 4)
    model.blocks = nn.ModuleList([Helped()])
    everyframe.compile(model)
    (block,) = model.blocks
    before = block(x)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, other)
        wanted = Helped()(x)
        assert float((wanted - before).abs().max()) > 0.01
        torch.testing.assert_close(block(x), wanted)
    torch.testing.assert_close(block(x), before)


def test_an_attention_in_a_module_of_diffusers_is_another_state() -> None:
    """And the file of diffusers' own is among those whose change has blocks compiled again."""
    block = WanTransformerBlock(dim=8, ffn_dim=8, num_heads=1)
    description = Description()
    description.read(block)
    assert attention_dispatch.__file__ in description.files
    before, watch = describe(block).key, StateWatch(description)
    assert watch.is_unchanged()
    for owner, name, other in (
        (transformer_wan, "dispatch_attention_fn", lambda *given, **_: given[0]),
        (transformer_wan.WanAttnProcessor, "_attention_backend", "_native_math"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, other)
            assert not watch.is_unchanged()
            assert describe(block).key != before
    assert watch.is_unchanged()
    assert describe(block).key == before


class Attending(nn.Module):
    """Calls torch's attention by its name, as diffusers does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def attending() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([Attending()])
    return everyframe.compile(model)


@torch.no_grad()
def test_an_attention_in_place_of_torchs_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SageAttention says to put it on."""
    model, x = attending(), torch.randn(1, 2, 5, 4)
    (block,) = model.blocks  # type: ignore[misc]
    before, own = block(x), F.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *given: own(*given) * 2)
        torch.testing.assert_close(block(x), 2 * before)
        (note,) = compiled_blocks(model)["blocks.0"].report.notes
        assert note == "torch's attention function is replaced"
    torch.testing.assert_close(block(x), before)


@torch.no_grad()
def test_a_backend_of_diffusers_for_the_whole_process_is_another_package(
    compiler: PlantedCompiler,
) -> None:
    model, x = attending(), torch.randn(1, 2, 5, 4)
    (block,) = model.blocks  # type: ignore[misc]
    block(x)
    with attention_backend("_native_math"):
        block(x)
    block(x)
    assert compiler.count == 2


@torch.no_grad()
def test_a_package_is_also_for_a_process_without_diffusers(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of a family that needs none of it."""
    x = torch.randn(1, 2, 5, 4)
    for is_imported in (True, False):
        if not is_imported:
            monkeypatch.delitem(sys.modules, "diffusers.models.attention_dispatch")
        (block,) = attending().blocks  # type: ignore[misc]
        block(x)
    assert compiler.count == 1


def test_a_block_is_compiled_again_without_its_hook() -> None:
    """diffusers leaves the class's own `forward` on the module: it ran as written for good."""
    model = everyframe.compile(made())
    want = result(model)
    for block in model.blocks:
        HookRegistry.check_if_exists_or_initialize(block).register_hook(ModelHook(), "cache")
    torch.testing.assert_close(result(model), want, rtol=2e-5, atol=2e-5)
    (report, _) = [each.report for each in compiled_blocks(model).values()]
    assert any("is replaced" in note for note in report.notes)
    assert all(note.endswith("(step cache, offloading or casts): cache") for note in report.notes)
    for block in model.blocks:
        block._diffusers_hook.remove_hook("cache")
    report.notes.clear()
    torch.testing.assert_close(result(model), want, rtol=2e-5, atol=2e-5)
    assert not report.notes


def test_what_replaces_a_call_is_named() -> None:
    """Caches and casts were taken for offloading."""
    model, plain = everyframe.compile(made()), made()
    first, second = model.blocks
    add_hook_to_module(first.linear, AlignDevicesHook(execution_device="cpu"))  # type: ignore[no-untyped-call]
    vars(second.norm)["forward"] = lambda x: type(second.norm).forward(second.norm, x)
    torch.testing.assert_close(result(model), result(plain), rtol=2e-5, atol=2e-5)
    assert [[*block.report.notes] for block in compiled_blocks(model).values()] == [
        ["the call of linear is replaced by offloading of accelerate"],
        ["the call of norm is replaced by another function"],
    ]


def test_a_block_by_torch_compile_keeps_no_tensors_of_a_call(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.says = "planted"
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    model, seen = everyframe.compile(made()), list[Any]()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(weakref.ref(given[0])))
    result(model)
    assert all(block.is_compiled for block in compiled_blocks(model).values())
    assert [each() for each in seen] == [None, None]
