"""What a block is described by."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from everyframe.fast_paths.compilation.block_state import Description


def _shown(module: nn.Module, name: str) -> str:
    return f"{name} of {module.training}"


def described(name: str) -> Any:
    layer = nn.Linear(2, 2)
    layer.extra_repr = MethodType(partial(_shown, name=name), layer)  # type: ignore[method-assign]
    description = Description()
    description.read(nn.Sequential(layer))
    return description.data


def test_a_method_that_is_a_bound_partial_is_described_by_its_arguments() -> None:
    """As torchao gives each layer one to show its weight, which ended the call of every block."""
    assert described("weight") == described("weight")
    assert described("weight") != described("bias")
