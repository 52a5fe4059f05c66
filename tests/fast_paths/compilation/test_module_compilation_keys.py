"""A compiled block is never stale: what changed is computed, whatever it was compiled for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.events import Repaired
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import PLAIN, ComponentPlan, Plan, Precision, Repair, Settings
from everyframe.fast_paths import apply
from everyframe.fast_paths.apply import apply_fast_paths
from everyframe.fast_paths.compilation.module_compilation import compile_blocks, is_compiled
from everyframe.fast_paths.compilation.toolchain import why_not
from everyframe.ops.attention import attend_by
from everyframe.runtime.interface import VideoState
from everyframe.runtime.stages.guard import Guard


class Block(nn.Module):
    """A layer, a scalar of its own, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 2.0

    def forward(self, x: Tensor, gain: float, is_doubled: bool = False) -> Tensor:
        y: Tensor = self.linear(x) * self.scale + gain
        return y * 2 if is_doubled else y


class Model(nn.Module):
    """Two blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, gain: float, is_doubled: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, gain, is_doubled)
        return x


#: torch's own way of running a graph, whose graphs and guards are those of every backend; and the
#: compiler that runs have, which makes kernels of its own and takes half a minute and more.
BACKENDS = (
    "eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow, pytest.mark.skipif(bool(missing := why_not()), reason=str(missing)),
        ],
    ),
)  # fmt: skip


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    # Of its own: a compiler that was killed elsewhere leaves half a library in the one of all.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = Model().eval().requires_grad_(False)
    compile_blocks(made, ("blocks.0", "blocks.1"), backend=request.param)
    return made


def plainly(model: Model, *given: object) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        out: Tensor = model(*given)
    return out


def check_same(got: Tensor, want: Tensor) -> None:
    """The same but for the order of sums of eight numbers in float32."""
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_nothing_that_changes_is_baked_in(model: Model) -> None:
    x = torch.randn(3, 8)
    block = model.blocks[0]
    assert isinstance(block, Block)

    def check(*given: object) -> Tensor:
        got: Tensor = model(*given)
        check_same(got, plainly(model, *given))
        return got

    seen = [check(x, 0.5)]
    seen.append(check(x, 0.9))  # a scalar that it is given
    seen.append(check(x, 0.9, True))  # a branch
    block.scale = 3.0  # a scalar of its own
    seen.append(check(x, 0.9))
    block.linear.weight.data = block.linear.weight.data * 2  # other weights in its place
    seen.append(check(x, 0.9))
    block.linear.weight.data.mul_(2)  # the same memory, other numbers
    seen.append(check(x, 0.9))
    block.linear.bias = nn.Parameter(torch.ones(8), requires_grad=False)
    seen.append(check(x, 0.9))
    handle = block.linear.register_forward_hook(lambda *given: given[2] + 1)  # a hook, put on
    seen.append(check(x, 0.9))
    handle.remove()  # and taken off
    check_same(check(x, 0.9), seen[-2])
    assert all(float((a - b).abs().max()) > 0.01 for a, b in pairwise(seen))
    for rows in (1, 2, 5, 7):  # other shapes
        check(torch.randn(rows, 8), 0.9)
    check(x.double().float(), 0.9)


@torch.no_grad()
def test_a_raised_block_is_computed_as_raised(model: Model) -> None:
    x = torch.randn(3, 8)
    model.to(torch.bfloat16)
    narrow = model(x.bfloat16(), 0.5)
    model.to(torch.float32)
    wide = model(x, 0.5)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    check_same(wide, plainly(model, x, 0.5))


def test_names_and_parameters_stay(model: Model) -> None:
    assert list(model.state_dict()) == list(Model().state_dict())
    attend_by(model, "math").remove()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert why_not() == "no C++ compiler (g++): apt install g++, or name another one in CXX"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    assert why_not() is None


@torch.no_grad()
@pytest.mark.parametrize(("number", "by"), [(1, float("nan")), (0, 3e38)])
def test_a_wrong_graph_is_left_for_the_block_as_it_is_written(number: int, by: float) -> None:
    """Also one whose own values are finite, and only those of the blocks after it are not."""

    def broken(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *given: tuple((each * by).clamp(-3e38, 3e38) for each in graph(*given))

    torch._dynamo.reset()
    model, x = Model().eval().requires_grad_(False), torch.randn(3, 8)
    want = model(x, 0.5)
    wrong = f"blocks.{number}"
    compile_blocks(model, (f"blocks.{1 - number}",), backend="eager")
    compile_blocks(model, (wrong,), backend=broken)
    device = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)
    part = ComponentPlan("m", "m", "denoise", "", 0, "cpu", Precision("float32", "float32"), 0, 0)
    plan = Plan("m", "m", "m", settings(), device, 1, (part,))
    guard = Guard(plan, "denoise", {"m": model})
    video = VideoState(3)
    guard.start_video(video)
    assert guard.call(1, lambda: model(x, 0.5)).equal(want)
    (event,) = guard.events()
    assert isinstance(event, Repaired)
    assert (event.module, event.target, event.cause) == (wrong, wrong, "compiled")
    assert (event.to, event.seed) == (PLAIN, 3)
    assert f"a compiled graph in m.{wrong} made values that" in event.text
    assert "uncompiled it is" in event.text
    # The other one stays, and what is remembered is that of this video.
    assert [is_compiled(block) for block in model.blocks] == [number == 1, number == 0]
    assert video.repairs == (Repair("m", wrong, PLAIN, "float32"),)
    assert guard.call(2, lambda: model(x, 0.5)).equal(want)
    assert not list(guard.events())
    guard.end()
    assert [is_compiled(block) for block in model.blocks] == [True, True]
    assert not model(x, 0.5).isfinite().all()


def test_what_is_remembered_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr(apply, "compile_blocks", lambda _, blocks, **__: names.append([*blocks]))
    for plain in ((), ("blocks.1",), ("blocks.1.linear",), ("blocks",), ("",)):
        apply_fast_paths(Model(), ("compile",), plain=plain)
    assert names == [["blocks.0", "blocks.1"], ["blocks.0"], ["blocks.0", "blocks.1"], [], []]


def settings() -> Settings:
    return Settings("a", None, 16, 16, 3, 24.0, 2, 7.0, 1)
