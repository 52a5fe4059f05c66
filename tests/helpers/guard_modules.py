"""Small modules for the guard's tests, and what the tests ask of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyframe.core.events import Repaired
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Plan, Precision, Settings
from everyframe.precision import cast_hooks
from everyframe.runtime.guard import Guard

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
