"""What a block is described by."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from diffusers import Transformer2DModel
from torch import nn

from everyframe.fast_paths.compilation.block_state import Description, describe


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


def test_a_config_in_a_block_has_one_key_in_each_process() -> None:
    """diffusers lists what nobody gave in a set's order: UNets were compiled in each process."""
    block = Transformer2DModel(1, 8, in_channels=8, norm_num_groups=1)
    before = describe(block).key
    block.config["_use_default_values"].reverse()
    assert describe(block).key == before
    block.config["_use_default_values"].clear()
    assert describe(block).key == before
    block.register_to_config(attention_bias=True)
    assert describe(block).key != before
