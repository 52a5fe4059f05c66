"""The first call in float16 is looked into: overflow that later operations hide is found there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from everyframe.numerics.overflow_probe import OverflowProbe
from everyframe.runtime.stages import guard as guard_module
from everyframe.runtime.stages.denoise_stage import GuardedDenoiser
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import (
    CLOSE,
    eye,
    halved,
    inputs,
    plan,
    repairs,
)


class Tanh(nn.Module):
    """Of what is beyond float16, as of all that is large, it makes 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 1e5).tanh()


class RootMeanSquare(nn.Module):
    """By hand: squares overflow, and what is divided by the root of infinity is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt()


class CastRootMeanSquare(nn.Module):
    """The mean is taken in float32, and a cast to the dtype of the weights makes it infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.takes_any_dtype = True

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = x.to(wide).pow(2).mean(-1, keepdim=True)
        return self.weight * x * mean.to(self.weight.dtype).rsqrt()


class Masks(nn.Module):
    """Infinities that are right: a mask that grows beyond float16, and exp of it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8, 8, dtype=x.dtype)
        mask = mask.masked_fill(torch.ones(8, 8).triu(1).bool(), torch.finfo(x.dtype).min)
        return ((x.mT @ x + mask * 1.5).softmax(-1) @ x.mT).mT


SWALLOWED: dict[str, tuple[Callable[[], Sequence[nn.Module]], str, str]] = {
    # what is planted; the operation and the module that are named
    "tanh": (lambda: [eye(300), eye(300), Tanh(), eye()], "linear", "1"),
    "norm": (lambda: [eye(1000), RootMeanSquare(), eye()], "pow", "1"),
    "cast": (lambda: [eye(1000), CastRootMeanSquare(), eye()], "cast", "1"),
}


@pytest.mark.parametrize("name", list(SWALLOWED))
def test_an_overflow_that_comes_to_nothing_is_found_in_the_first_call(name: str) -> None:
    make, operation, module = SWALLOWED[name]
    net = nn.Sequential(*make())
    reference = copy.deepcopy(net).double()
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = reference(inputs().half().double())
        wrong = net(inputs())
        assert bool(wrong.isfinite().all())
        assert float((wrong - wanted).abs().max()) > 0.1 * float(wanted.abs().max())
        answer = GuardedDenoiser(guard, lambda: net)(inputs())
    assert float((answer - wanted).abs().max()) < CLOSE * float(wanted.abs().max())
    first = repairs(guard)[0]
    assert (first.operation, first.module, first.cause) == (operation, module, "range")
    assert "became finite later and changed the result" in first.text
    guard.end()
    assert net[int(module)] is not None
    assert {each.dtype for each in net.parameters()} == {torch.float16}


@pytest.mark.parametrize("parts", [[Masks()], [eye(), Masks(), eye()]])
def test_an_overflow_that_changes_nothing_is_let_be(parts: list[nn.Module]) -> None:
    net = halved(nn.Sequential(*parts))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = net(inputs())
        assert torch.equal(guard.call(1, lambda: net(inputs())), wanted)
    assert not list(guard.events())


class Flexible(nn.Module):
    """Attention that torch compiles by itself, and whose inner operations are no plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = eye()

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x)[:, None]
        return flex_attention(q, q, q)[:, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_compiles_itself_is_seen_through() -> None:
    net = halved(nn.Sequential(eye(), Flexible(), eye(6e4)))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = net[:2](inputs())
        assert torch.equal(guard.call(1, lambda: net[:2](inputs())), wanted)
        assert bool(guard.call(2, lambda: net(inputs())).isfinite().all())
    assert repairs(guard)[0].module == "2"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*non-infra torch dispatch mode:UserWarning")
def test_what_somebody_compiled_stays_compiled_in_the_first_call() -> None:
    net, graphs = halved(nn.Linear(8, 8)), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compute = torch.compile(lambda x: net(x).tanh(), backend=backend)
    guard = Guard(plan(), "decode", {"net": net})
    with torch.inference_mode():
        wanted = compute(inputs())
        assert torch.equal(guard.call(1, lambda: compute(inputs())), wanted)
    assert len(graphs) == 1


def test_only_the_first_call_in_float16_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OverflowProbe] = []

    class Counted(OverflowProbe):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(guard_module, "OverflowProbe", Counted)
    for dtype, expected in (("float32", 0), ("bfloat16", 0), ("float16", 1)):
        net = halved(nn.Linear(8, 8), dtype)
        guard = Guard(plan(), "denoise", {"net": net})
        with torch.inference_mode():
            wanted = net(inputs())
            for step in (1, 2, 3):
                assert torch.equal(guard.call(step, lambda: net(inputs())), wanted)  # noqa: B023
        assert len(made) == expected
