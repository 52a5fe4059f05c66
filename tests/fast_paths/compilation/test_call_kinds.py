"""Kinds of calls of a compiled block: how many are compiled, and tensors of their own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import everyframe
from everyframe.fast_paths.compilation import compiled_block, module_compilation, package_store
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from helpers.compiled_blocks import Block, Model, inputs, made
from helpers.planted_compiler import PlantedCompiler

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(autouse=True)
def three_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_block, "_MOST", 3)


@torch.no_grad()
def check(model: Model, *given: Any) -> None:
    """The model gives what another one of the same weights gives as written."""
    plain = made()
    plain.load_state_dict(model.state_dict())
    for block, own in zip(plain.blocks, model.blocks, strict=True):
        block.scale = own.scale
    # The same program in float32, in the order in which torch's export writes it down.
    torch.testing.assert_close(model(*given), plain(*given), rtol=2e-5, atol=2e-5)


def notes(model: Model) -> list[str]:
    return [*compiled_blocks(model)["blocks.0"].report.notes]


def test_too_many_ways_run_as_written(compiler: PlantedCompiler) -> None:
    model = everyframe.compile(made())
    for gain in (1.0, 2.0, 3.0, 4.0, 5.0):
        check(model, *inputs(), gain)
    assert compiler.count == 3
    assert any("ways" in note for note in notes(model))


def test_ways_that_were_refused_count(compiler: PlantedCompiler) -> None:
    """A number of each step, where compiled code isn't faster, was compiled in each step."""
    compiler.verdict = "refused"
    model = everyframe.compile(made())
    for gain in (1.0, 2.0, 3.0, 4.0, 5.0):
        check(model, *inputs(), gain)
    assert compiler.count == 3


def test_each_change_has_ways_of_its_own(compiler: PlantedCompiler) -> None:
    """Blocks that are called in many ways, as LTX 2's, ran as written after their first LoRA."""
    model = everyframe.compile(made())
    for number, scale in enumerate((2.0, 3.0, 4.0, 5.0)):
        for block in model.blocks:
            block.scale = scale  # type: ignore[assignment]
        for gain in (1.0, 2.0):
            check(model, *inputs(), gain)
        assert compiler.count == 2 * min(number + 1, 3)
        is_told = [compiled_block._CHANGED] if number == 3 else []
        assert notes(model) == is_told
    everyframe.compile(model)
    check(model, *inputs())
    assert compiler.count == 7


def test_sizes_that_one_package_takes_are_one_way(compiler: PlantedCompiler) -> None:
    """After videos of some sizes, one without guidance ran as written."""
    compiler.is_dynamic = True
    model = everyframe.compile(made())
    for length in range(5, 10):
        check(model, *inputs(2, length))
    assert compiler.count == 1
    check(model, *inputs(1, 6))
    assert compiler.count == 2
    assert not notes(model)


def test_what_was_refused_is_not_looked_up_in_each_call(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.verdict = "refused"
    model, looked_up = everyframe.compile(made()), []
    find = package_store.find
    monkeypatch.setattr(package_store, "find", lambda key: looked_up.append(key) or find(key))
    check(model, *inputs())
    check(model, *inputs())
    before = len(looked_up)
    check(model, *inputs())
    assert len(looked_up) == before
    assert compiled_blocks(model)["blocks.0"].report.notes["planted"] == 3
    assert not compiled_blocks(model)["blocks.0"].is_compiled


def test_a_compiler_that_fails_leaves_blocks_as_written(
    compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's call ended with the compiler's error; now it is asked once, and nothing stays."""
    is_broken, asked = True, list[Any]()

    def compile_in_a_call(call: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            asked.append(call)
            if is_broken:
                raise BackendCompilerFailed(call, RuntimeError("no headers\nand more"), None)
            return call(*args, **kwargs)

        return compiled

    def written_calls(model: Model) -> int:
        return compiled_blocks(model)["blocks.0"].report.notes["torch.compile fails: no headers"]

    monkeypatch.setattr(
        module_compilation, "_graphs", lambda call, backend: compile_in_a_call(call)
    )
    monkeypatch.setattr(compiled_block, "_FAILED", {})
    compiler.says = "planted"
    model = everyframe.compile(made())
    for number in (1, 2):
        check(model, *inputs())
        assert written_calls(model) == number
    assert len(asked) == 1, "not for each block and call"
    assert not [*package_store.packages_folder().rglob("*.json")]
    # What an earlier process has certified fails in the same way.
    compiled_block._FAILED.clear()
    is_broken = False
    check(everyframe.compile(made()), *inputs())
    is_broken = True
    model = everyframe.compile(made())
    check(model, *inputs())
    check(model, *inputs())
    assert written_calls(model) == 2


class Doubled(Tensor):
    """A tensor whose numbers are not what they seem, as those of quantizers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is not nn.functional.linear:
            return result
        return result.as_subclass(Tensor).sin()


def by_torch(model: Model, asked: list[Any]) -> None:
    """Compile a model, with a torch.compile that only counts."""
    for block in model.blocks:
        block._compiled_call_impl = compiled_block.CompiledBlock(
            block, dynamic=True, compiles=True, warns=True,
            fallback=lambda call: asked.append(call) or call,
        )  # fmt: skip


def test_weights_of_another_kind_are_left_to_torch_compile(compiler: PlantedCompiler) -> None:
    """torchao's have another meaning than their sizes say."""

    class Another(Tensor):
        pass

    asked: list[Any] = []
    model, plain = made(), made()
    for block in (*model.blocks, *plain.blocks):
        assert isinstance(block, Block)
        weight = block.linear.weight.data.as_subclass(Another)
        block.linear.weight = nn.Parameter(weight, requires_grad=False)
    by_torch(model, asked)
    with torch.no_grad():
        found, wanted = (each(*inputs()).as_subclass(Tensor) for each in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert len(asked) == 1  # its result is such a tensor too, which the next block runs as written
    assert compiler.count == 0


@torch.no_grad()
def test_weights_that_get_a_class_of_their_own_are_left_to_torch_compile(
    compiler: PlantedCompiler,
) -> None:
    """As a quantizer sets them in a compiled model."""
    asked: list[Any] = []
    model = made()
    by_torch(model, asked)
    before = model(*inputs())
    for block in (*model.blocks, *(plain := made()).blocks):
        assert isinstance(block, Block)
        weight = block.linear.weight.data.as_subclass(Doubled)
        block.linear.weight = nn.Parameter(weight, requires_grad=False)
    after = model(*inputs())
    assert len(asked) == 2
    assert compiler.count == 1
    assert float((after - before).abs().max()) > 0.01
    torch.testing.assert_close(after, plain(*inputs()), rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_an_argument_of_a_class_of_its_own_runs_as_written() -> None:
    """Also after a plain one."""
    model, plain = everyframe.compile(made()), made()
    x, text = inputs()
    before = model(x, text)
    own = x.as_subclass(Doubled)
    after = model(own, text)
    assert float((after - before).abs().max()) > 0.01
    torch.testing.assert_close(after, plain(own, text), rtol=2e-5, atol=2e-5)
    assert notes(model) == ["its arguments are no plain tensors"]
