"""Small modules for the guard's tests, with their plans and calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from everyframe.core.events import Repaired
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Plan, Precision, Settings
from everyframe.precision import cast_hooks
from everyframe.runtime.stages.guard import Guard

CPU = DeviceFacts("a processor", "cpu", None, memory=10**12, free_memory=10**12)
#: Of a few layers in float16 among others in float32, to numbers around 1.
CLOSE = 1e-2


def plan(device: DeviceFacts = CPU, prompt: str = "a red circle") -> Plan:
    settings = Settings(prompt, None, 8, 8, 4, 8.0, 3, 1.0, 0)
    return Plan("toy", "toy", "Toy", settings, device, 1, ())


class Net(nn.Module):
    """Three middle parts, of which one is faulty, between layers that are not."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleList(parts)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(self.norm(x))


class ZeroByZero(nn.Module):
    """A formula that is wrong in every precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x) * 0


def eye(size: float = 1.0) -> nn.Module:
    """A layer that hands on what it is given, so many times as large."""
    layer = nn.Linear(8, 8, bias=False)
    layer.weight.data = size * torch.eye(8)
    return layer


def planted(make: Callable[[], nn.Module], place: int) -> nn.Module:
    """A net whose part of that number is `make()`; what comes to it is known."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
        parts[place] = make()
        net = Net(*parts)
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(8))
        for number in range(place):
            net.parts[number].weight.copy_(torch.eye(8))
    return net.requires_grad_(False)


def scaled(module: nn.Module, by: float) -> nn.Module:
    """With weights so much larger, none of them beyond float16."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(by)
            assert parameter.abs().max() < 60_000
    return module


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed))


def halved(net: nn.Module, dtype: str = "float16") -> nn.Module:
    net.eval().requires_grad_(False)
    cast_hooks.add_cast_hooks(net, Precision(dtype, dtype))
    return net


def repairs(guard: Guard) -> list[Repaired]:
    return [event for event in guard.events() if isinstance(event, Repaired)]
