"""Modules that stand for those of torch are called as they are."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from everyframe.fast_paths.modules import cpu_modules
from everyframe.precision.packed_linear import PackedLinear
from everyframe.precision.quantization import QuantizedLinear

OF_TORCH = [
    (plain, own)
    for kinds in cpu_modules.KINDS.values()
    for plain, own in kinds.items()
    if plain.__module__.startswith("torch.")
]


@pytest.mark.parametrize(
    ("plain", "own"), [*OF_TORCH, (nn.Linear, QuantizedLinear), (nn.Linear, PackedLinear)]
)
def test_parameters_have_torchs_names(plain: type[nn.Module], own: type[nn.Module]) -> None:
    """AnimateDiff calls ``proj_in(input=...)``, which a layer by oneDNN did not take."""
    found, wanted = (list(inspect.signature(each.forward).parameters) for each in (own, plain))
    assert found[: len(wanted)] == wanted
    more = [inspect.signature(own.forward).parameters[name] for name in found[len(wanted) :]]
    assert all(each.default is not each.empty for each in more)
