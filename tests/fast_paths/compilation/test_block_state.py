"""What a block is described by."""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from diffusers import Transformer2DModel
from torch import Tensor, nn

from everyframe.fast_paths.compilation.block_state import Description, StateWatch, describe


def _shown(module: nn.Module, name: str) -> str:
    return f"{name} of {module.training}"


def _read(block: nn.Module) -> Description:
    description = Description()
    description.read(block)
    return description


def described(name: str) -> Any:
    layer = nn.Linear(2, 2)
    layer.extra_repr = MethodType(partial(_shown, name=name), layer)  # type: ignore[method-assign]
    return _read(nn.Sequential(layer)).data


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


class Scaled(nn.Module):
    """An activation with a number of its own."""

    by = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return stretch(x) * self.by


def stretch(x: Tensor) -> Tensor:
    return F.silu(x)


ACTIVATION: Any = Scaled()


class Activated(nn.Module):
    """As Llama's layers, whose activations' module has an instance by name."""

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = ACTIVATION(x)
        return activated


def test_a_module_that_a_block_finds_by_name_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers and functions too. Such blocks were not compiled at all."""
    block = Activated()
    first = describe(block)
    assert not first.why_not
    assert describe(block).key == first.key
    assert __file__ in _read(block).files

    for owner, name, other in (
        (ACTIVATION, "by", 3.0), (Scaled, "by", 3.0), (sys.modules[__name__], "stretch", F.gelu),
        (sys.modules[__name__], "ACTIVATION", nn.SiLU()),
    ):  # fmt: skip
        watch = StateWatch(_read(block))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other, raising=False)
            assert not watch.is_unchanged(), name
            assert describe(block).key != first.key, name
        assert describe(block).key == first.key, name


def test_what_holds_weights_and_is_found_by_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ACTIVATION", nn.Linear(2, 2))
    assert describe(Activated()).why_not == "ACTIVATION is a Linear, which can't be compared"


def test_a_number_of_numpy_is_a_number() -> None:
    """HunyuanVideo 1.5's autoencoder computes with them which of its levels halve the time."""
    block, other = nn.Identity(), nn.Identity()
    block.is_halved, other.is_halved = np.bool_(True), np.bool_(False)
    assert not describe(block).why_not
    assert describe(block).key != describe(other).key
