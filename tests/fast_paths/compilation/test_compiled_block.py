"""A compiled block computes what it would as written, whatever changes after it was compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everyframe
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.sharding import Sharding
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.fast_paths.compilation import block_state, compiled_block, package_store
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks, disable_compiled
from everyframe.parallel.communicator import ONE
from everyframe.runtime.memory import offload
from helpers.compiled_blocks import Block, Model, Scaled, Text, inputs, made
from helpers.planted_compiler import PlantedCompiler

pytestmark = pytest.mark.usefixtures("compiler")


def blocks_of(model: Model) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def check(model: Model, *given: Any, **named: Any) -> Tensor:
    """The model's result, which is that of its blocks as written."""
    with torch.no_grad():
        undo = disable_compiled(model)
        want: Tensor = model(*given, **named)
        undo()
        got: Tensor = model(*given, **named)
    # The same program in float32, in the order in which torch's export writes it down.
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    return got


def doubled(model: Model) -> None:
    for block in blocks_of(model):
        block.linear.weight.data = block.linear.weight.data * 2


def in_place(model: Model) -> None:
    for block in blocks_of(model):
        block.linear.weight.data.mul_(0.5)


def other_parameter(model: Model) -> None:
    for block in blocks_of(model):
        block.linear.bias = nn.Parameter(torch.ones(16), requires_grad=False)


def other_number(model: Model) -> None:
    for block in blocks_of(model):
        block.scale = 3.0


def other_number_of_an_object(model: Model) -> None:
    for block in blocks_of(model):
        block.processor.gain = -1.0


def other_table(model: Model) -> None:
    for block in blocks_of(model):
        block.table = block.table + 1


def no_bias(model: Model) -> None:
    for block in blocks_of(model):
        block.linear.bias = None


def adapter(model: Model) -> None:
    """As a LoRA is put on: another module in the layer's place."""
    torch.manual_seed(3)
    for block in blocks_of(model):
        block.linear = nn.Sequential(block.linear, Scaled(16)).requires_grad_(False)  # type: ignore[assignment]


def hook_inside(model: Model) -> None:
    for block in blocks_of(model):
        block.linear.register_forward_hook(lambda *given: given[2].sin())


def hook_on_the_block(model: Model) -> None:
    for block in blocks_of(model):
        block.register_forward_hook(lambda *given: given[2] + 1)
        block.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2, *args[1:]), kwargs),
                                        with_kwargs=True)  # fmt: skip


def other_call(model: Model) -> None:
    for block in blocks_of(model):
        whole = block.linear.forward
        vars(block.linear)["forward"] = lambda x, whole=whole: whole(x).sin()


CHANGES: list[Callable[[Model], None]] = [
    doubled, in_place, other_parameter, other_number, other_number_of_an_object, other_table,
    no_bias, adapter, hook_inside, hook_on_the_block, other_call,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_after_compiling_is_computed(change: Callable[[Model], None]) -> None:
    model = everyframe.compile(made())
    before = check(model, *inputs())
    change(model)
    after = check(model, *inputs())
    assert float((before - after).abs().max()) > 0.01


def test_an_adapters_scale_changes_after_compiling() -> None:
    model = made()
    adapter(model)
    everyframe.compile(model)
    before = check(model, *inputs())
    for block in blocks_of(model):
        block.linear[1].scaling["default"] = 5.0  # type: ignore[index]
    assert float((before - check(model, *inputs())).abs().max()) > 0.01


def test_arguments_are_not_baked_in(compiler: PlantedCompiler) -> None:
    model = everyframe.compile(made())
    x, text = inputs()
    seen = [
        check(model, x, text),
        check(model, x, text, 0.5),  # a number
        check(model, x, text, 0.5, torch.arange(16) > 7),  # one that was None
        check(model, x * 2, Text(text.keys * 2), 0.5),
    ]
    assert len({float(each.sum()) for each in seen}) == len(seen)
    assert compiler.count == 3  # the last one needs no other package, nor do equal blocks


def test_sizes_are_dynamic_and_one_is_of_its_own(compiler: PlantedCompiler) -> None:
    compiler.is_dynamic = True
    model = everyframe.compile(made())
    for batch, length in ((2, 6), (3, 9), (2, 6), (5, 31)):
        check(model, *inputs(batch, length))
    assert compiler.count == 1
    check(model, *inputs(1, 6))  # without guidance: a batch of one
    check(model, *inputs(1, 11))
    assert compiler.count == 2


def test_fixed_sizes_have_a_package_each(compiler: PlantedCompiler) -> None:
    compiler.is_dynamic = True
    model = everyframe.compile(made(), dynamic=False)
    for length in (6, 9, 6):
        check(model, *inputs(2, length))
    assert compiler.count == 2


def test_sizes_that_differ_from_each_other_are_not_mixed_up(compiler: PlantedCompiler) -> None:
    """Compiled where two sizes happen to be equal, and called where they are not."""
    compiler.is_dynamic = True
    model = everyframe.compile(made())
    x, text = inputs(2, 5)
    assert x.shape == text.keys.shape
    check(model, x, text)
    check(model, torch.randn(2, 9, 16), text)


def test_strides_are_not_assumed(compiler: PlantedCompiler) -> None:
    compiler.is_dynamic = True
    model = everyframe.compile(made())
    x, text = inputs(2, 6)
    check(model, x, text)
    check(model, x.transpose(0, 1).contiguous().transpose(0, 1), text)
    check(model, x[:, :1].expand(-1, 6, -1), text)


def test_a_cast_model_has_a_package_of_its_dtype(compiler: PlantedCompiler) -> None:
    model = everyframe.compile(made())
    check(model, *inputs())
    model.to(torch.float64)
    x, text = inputs()
    got = check(model, x.double(), Text(text.keys.double()))
    assert got.dtype == torch.float64
    assert compiler.count == 2


def test_a_model_is_a_model_afterwards() -> None:
    model = made()
    names = list(model.state_dict())
    assert everyframe.compile(model) is model
    check(model, *inputs())
    assert type(model) is Model
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert not compiled_blocks(copied)
    check(copied, *inputs())


def test_offloaded_blocks_use_their_packages(compiler: PlantedCompiler) -> None:
    model = made()
    offloaded = offload.apply(model, "cpu")
    everyframe.compile(model)
    check(model, *inputs())
    for block in compiled_blocks(model).values():
        assert block.report.packages
        assert not block.report.notes
    assert compiler.count == 1
    offloaded.remove()


@pytest.mark.slow
def test_a_sharded_model_of_one_rank_uses_the_packages_of_an_unsharded_one(
    compiler: PlantedCompiler,
) -> None:
    """So does every run: one rank takes the path of many, and a trial has the block alone."""
    config = STDiT3Config(hidden_size=32, num_heads=2, depth=2, caption_channels=8,
                          model_max_length=4)  # fmt: skip
    torch.manual_seed(0)
    model = STDiT3(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    latents, text = torch.randn(2, 4, 3, 4, 8), torch.randn(2, 4, 8)
    t = torch.tensor([500.0, 500.0])

    def call() -> Tensor:
        out: Tensor = model(latents, t, model.context(text), fps=24.0, height=32, width=64)
        return out

    with torch.no_grad():
        want = call()
        everyframe.compile(model)
        torch.testing.assert_close(call(), want, rtol=2e-5, atol=2e-5)
        assert compiler.count == 2  # a spatial block and a temporal one
        with Sharding(model, ONE):
            torch.testing.assert_close(call(), want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(call(), want, rtol=2e-5, atol=2e-5)
    assert compiler.count == 2
    for block in compiled_blocks(model).values():
        assert not block.report.notes


def test_gradients_run_as_written() -> None:
    model = everyframe.compile(made())
    model.requires_grad_(True)
    x, text = inputs()
    model(x, text).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    (note, *_) = compiled_blocks(model)["blocks.0"].report.notes
    assert "gradients are on" in note


def test_a_wrong_library_is_not_used(compiler: PlantedCompiler) -> None:
    compiler.by = 1.01
    model = everyframe.compile(made())
    check(model, *inputs())
    (block, other) = compiled_blocks(model).values()
    assert not block.report.packages
    assert "off by" in next(iter(block.report.notes))
    # And is not compiled again: by the next block, nor in the next process.
    assert "off by" in next(iter(other.report.notes))
    assert compiler.count == 1


def test_a_library_that_turns_wrong_is_not_used(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if what it was made of had changed, and nothing had noticed."""
    model = everyframe.compile(made())
    check(model, *inputs())
    compiler.by = 1.01
    monkeypatch.setattr(compiled_block, "_CHECKED", set())  # another process
    again = everyframe.compile(made())
    check(again, *inputs())
    (block, _) = compiled_blocks(again).values()
    assert "from the block as written" in next(iter(block.report.notes))


def test_a_library_that_is_not_faster_is_not_used(compiler: PlantedCompiler) -> None:
    compiler.verdict = "refused"
    model = everyframe.compile(made())
    check(model, *inputs())
    (block, _) = compiled_blocks(model).values()
    assert [*block.report.notes] == ["planted"]


def by_torch(model: Model, asked: list[Any], *, compiles: bool = True) -> None:
    """Compile a model, with a torch.compile that only counts."""
    how: Any = {"dynamic": True, "compiles": compiles}
    for block in model.blocks:
        block._compiled_call_impl = compiled_block.CompiledBlock(
            block, **how, warns=True, fallback=lambda call: asked.append(call) or call
        )


def test_what_has_no_package_is_left_to_torch_compile(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.says = "planted"
    failed = []
    monkeypatch.setattr(
        compiled_block, "compile_block",
        lambda *given, **named: failed.append(given) or compiler.compile(*given, **named),
    )  # fmt: skip
    asked: list[Any] = []
    by_torch(model := made(), asked)
    check(model, *inputs())
    check(model, *inputs(3, 8))
    assert len(asked) == 4  # once for each block and size, which torch tells apart by its guards
    assert len(failed) == 1  # and what can't be exported is not exported again
    # A run that compiles nothing itself knows it from the trial.
    by_torch(again := made(), asked, compiles=False)
    check(again, *inputs())
    assert len(asked) == 6
    assert compiled_blocks(again)["blocks.0"].is_compiled
    assert not compiled_blocks(again)["blocks.0"].report.packages


def test_torch_compile_is_certified_too(compiler: PlantedCompiler) -> None:
    compiler.says, compiler.verdict = "planted", "refused"
    by_torch(model := made(), [])
    check(model, *inputs())
    (block, other) = compiled_blocks(model).values()
    assert not block.is_compiled
    assert [*other.report.notes] == ["torch.compile: planted (planted)"]


def test_other_source_is_another_package(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyframe.compile(model := made())
    check(model, *inputs())
    monkeypatch.setattr(block_state, "source_digest", lambda files: "edited")
    everyframe.compile(again := made())
    check(again, *inputs())
    assert compiler.count == 2


def test_another_machine_is_another_package(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyframe.compile(model := made())
    check(model, *inputs())
    facts = package_store.machine(torch.device("cpu"))
    monkeypatch.setattr(compiled_block, "machine", lambda _: {**facts, "torch": "2.99"})
    everyframe.compile(again := made())
    check(again, *inputs())
    assert compiler.count == 2


@pytest.mark.parametrize("by", ["block", "inner"])
def test_a_block_that_writes_to_its_input_does_so_compiled(by: str) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(self.linear(x))
            return x if by == "block" else x * 2

    model = nn.Module()
    model.blocks = nn.ModuleList([Writing()]).requires_grad_(False)
    everyframe.compile(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            plain = x.clone()
            want = model.blocks[0].forward(plain)  # type: ignore[operator]
            got = model.blocks[0](x)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(x, plain)
