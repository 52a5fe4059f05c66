"""The guard names the module and operation in which a fault arises, and no other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.errors import NumericsError
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.prefetch import LocalWeightsProvider
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import (
    CLOSE,
    ZeroByZero,
    eye,
    halved,
    inputs,
    plan,
    planted,
    repairs,
    scaled,
)


class Small(nn.Module):
    """An epsilon that float16 rounds to zero."""

    def forward(self, x: Tensor) -> Tensor:
        zero = (x - x).abs() + 1e-9
        return x * zero / zero


def test_what_was_lost_before_an_operation_is_repaired_too() -> None:
    net = halved(planted(Small, 1))
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(inputs())).isfinite().all())
    assert repairs(guard)[0].module == "parts.1"


class LogOfVanished(nn.Module):
    """float16 rounds to 0 what the logarithm is taken of."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 1e-9 + 1e-9).log()


class LogOfRounded(nn.Module):
    """A difference that float16 rounds to 0 below what is taken of it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 4096.5 - 4096 - x.abs() * 0.5 - 0.25).log()


class Handing(nn.Module):
    """The zero is made elsewhere, and handed on to where its logarithm is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() * 1e-9 + 1e-9


class Log(nn.Module):
    """A logarithm of what is handed on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Sigmoid(nn.Module):
    """By hand, in float32: its exp may be infinite, which is right."""

    def forward(self, x: Tensor) -> Tensor:
        wide = 1000 * x.float()
        return (1 / (1 + (-wide).exp())).to(x.dtype)


MENDED: dict[str, tuple[Callable[[], Sequence[nn.Module]], str, str]] = {
    # what is planted; the operation and the module that are named
    "a log at the end": (lambda: [eye(), LogOfVanished()], "log", "1"),
    "a log before a layer": (lambda: [eye(), LogOfVanished(), nn.Linear(8, 8)], "log", "1"),
    "a log of a difference": (lambda: [eye(), LogOfRounded()], "log", "1"),
    "a log of what was lost before": (lambda: [eye(), Handing(), Log()], "log", "2"),
    "a harmless exp before": (lambda: [eye(), Sigmoid(), eye(6e4), eye(6e4)], "linear", "3"),
}


@pytest.mark.parametrize("name", list(MENDED))
def test_what_is_finite_in_float32_is_mended_and_rightly_named(name: str) -> None:
    make, operation, module = MENDED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*make())
    reference = copy.deepcopy(net).double()
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        wanted = reference(inputs().half().double())
        assert bool(wanted.isfinite().all())
        assert not bool(net(inputs()).isfinite().all()), "the fault was not planted"
        answer = guard.call(1, lambda: net(inputs()))
    assert bool(answer.isfinite().all())
    first = repairs(guard)[0]
    assert (first.operation, first.module) == (operation, module)
    assert first.to == "float32"
    assert float((answer - wanted).abs().max()) < CLOSE * float(wanted.abs().max())


def test_a_harmless_infinity_is_not_blamed_for_a_wrong_formula() -> None:
    net = nn.Sequential(Sigmoid(), ZeroByZero()).eval()
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode(), pytest.raises(NumericsError, match=r"div in net\.1"):
        guard.call(1, lambda: net(inputs()))


def test_a_weight_that_nothing_comes_of_is_not_blamed() -> None:
    """A row that no token asks for is not a number; another module's overflow is mended."""
    table = nn.Embedding(4, 8)
    net = nn.Sequential(table, scaled(nn.Linear(8, 8), 1e5), nn.Linear(8, 8))
    table.weight.data[3] = torch.nan
    halved(net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        assert bool(guard.call(1, lambda: net(torch.tensor([0, 1, 2]))).isfinite().all())
        assert repairs(guard)[0].module == "1"
        with pytest.raises(NumericsError, match=r"net\.0\.weight in 8 of 32"):
            guard.call(2, lambda: net(torch.tensor([0, 1, 3])))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("by", ["full_like", "constant", "fill", "item"])
def test_what_a_hook_hands_on_is_named_by_its_module(by: str, dtype: str, value: float) -> None:
    made_before = torch.full((2, 6, 8), value)

    def handing_on(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        if by == "full_like":
            return torch.full_like(result, value)
        if by == "constant":
            return made_before
        if by == "fill":
            return result.clone().fill_(value)
        copied = result.clone()
        copied[0, 1, 2] = value
        return copied

    net = planted(nn.Identity, 0)
    net.parts[1].register_forward_hook(handing_on)
    net = halved(net) if dtype == "float16" else net
    before = [(name, each.dtype) for name, each in net.named_parameters()]
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode(), pytest.raises(NumericsError, match=r" in net\.parts\.1 "):
        guard.call(1, lambda: net(inputs()))
    assert [(name, each.dtype) for name, each in net.named_parameters()] == before


@pytest.mark.parametrize("where", ["on the host", "in its file"])
def test_a_broken_weight_that_is_brought_for_its_call_is_named(where: str) -> None:
    """Another thread brings it, whose operations are not seen."""
    net = halved(planted(lambda: nn.Linear(8, 8), 1))
    net.parts[1].weight.data[0, 0] = torch.nan
    provider = None
    if where == "in its file":
        held = {name: each.detach().clone() for name, each in net.named_parameters()}
        provider = LocalWeightsProvider(lambda name, _: held[name].clone(), torch.device("cpu"))
        for name in offload.unit_parameters(net):
            part, _, own = name.rpartition(".")
            waiting = nn.Parameter(held[name].to("meta"), requires_grad=False)
            setattr(net.get_submodule(part), own, waiting)
    offload.apply(net, "cpu", provider)
    guard = Guard(plan(), "denoise", {"net": net})
    place = r"the weights themselves are not finite: net\.parts\.1\.weight"
    for _ in range(2):  # once more in the order of the calls before
        with torch.inference_mode(), pytest.raises(NumericsError, match=place):
            guard.call(1, lambda: net(inputs()))
