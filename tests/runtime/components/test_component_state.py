"""What a run leaves on a component is removed, or seen: each kind of leftover is planted here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from everyframe.runtime.components.component_state import ComponentState


class Layer(nn.Module):
    """A layer with attributes of its own beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.frames = [None, None]
        self.config = {"sizes": [1, 2]}
        self.scale = torch.ones(2)
        self.is_tiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).requires_grad_(False)


def _replace_weight(module: nn.Module) -> None:
    module[0].linear.weight = nn.Parameter(torch.zeros(4, 4))


TAKEN_OFF: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: module(torch.ones(4)),
    "hook": lambda module: module[1].linear.register_forward_hook(lambda m, x, y: y + 1),
    "hook before": lambda module: module[0].register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True, prepend=True
    ),
    "flag": lambda module: setattr(module[0], "is_tiled", True),
    "new attribute": lambda module: setattr(module[0], "cache", torch.ones(4)),
    "other list": lambda module: setattr(module[0], "frames", [torch.ones(4)]),
    "other child": lambda module: setattr(module[0], "linear", nn.Linear(4, 4)),
    "new child": lambda module: module.add_module("more", Layer()),
    "other weight": _replace_weight,
    "other buffer": lambda module: setattr(module[0], "table", torch.zeros(4)),
    "training": lambda module: module.train(not module.training),
    "compiled": lambda module: setattr(module[0], "_compiled_call_impl", lambda x: x),
}


@pytest.mark.parametrize("name", TAKEN_OFF)
def test_what_was_added_or_replaced_is_taken_off(name: str) -> None:
    module, x = made(), torch.linspace(-1, 1, 4)
    state, before = ComponentState(module), module(x)
    names = [name for name, _ in module.named_modules()]
    TAKEN_OFF[name](module)
    assert state.restore() == ""
    assert torch.equal(module(x), before)
    assert [name for name, _ in module.named_modules()] == names
    assert not module[0].is_tiled
    assert not hasattr(module[0], "cache")
    assert module[0].frames == [None, None]
    assert module[0].training


def _write(module: nn.Module) -> None:
    with torch.inference_mode():
        module[1].linear.weight[0].mul_(2)


def _write_aside(module: nn.Module) -> None:
    module[1].linear.weight.data = module[1].linear.weight.data * 2


LEFT: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "weight": (_write, "weight was changed"),
    "weight elsewhere": (_write_aside, "weight was changed"),
    "dtype": (lambda module: module.to(torch.bfloat16), "was changed"),
    "buffer": (lambda module: module[0].table.add_(1), "table was changed"),
    "list": (lambda module: module[0].frames.append(1), "frames was changed"),
    "deep list": (lambda module: module[0].config["sizes"].append(3), "config was changed"),
    "plain tensor": (lambda module: module[0].scale.mul_(2), "scale was changed"),
    "class": (lambda module: setattr(module[0], "__class__", nn.Identity), "it is a Identity"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_can_not_be_put_back_is_named(name: str) -> None:
    module = made()
    state = ComponentState(module)
    plant, message = LEFT[name]
    plant(module)
    assert message in state.restore()
