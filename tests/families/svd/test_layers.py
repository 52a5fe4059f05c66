"""The gated feed-forward against its formula in float64, whole and in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from everyframe.families.svd import layers
from everyframe.ops.activation import GatedGELU


@pytest.mark.parametrize(("shape", "num_calls"), [((2, 3, 8), 1), ((3, 700, 8), 2)])
def test_it_is_its_formula(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_calls: int
) -> None:
    monkeypatch.setattr(layers, "_MANY", 2**14)
    generator = torch.Generator().manual_seed(0)
    widen, narrow = nn.Linear(8, 64), nn.Linear(32, 8)
    for parameter in (*widen.parameters(), *narrow.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    calls = []

    def widened(x: Tensor) -> Tensor:
        calls.append(len(x))
        out: Tensor = widen(x)
        return out

    x = torch.randn(shape, generator=generator)
    with torch.no_grad():
        found = layers.gated_gelu(x, widened, narrow, 32, GatedGELU())
        value, gate = (widen.double()(x.double())).chunk(2, dim=-1)
        normal = 0.5 * (1 + torch.erf(gate / 2**0.5))
        exact = narrow.double()(value * gate * normal)
    assert found.shape == x.shape
    assert len(calls) == num_calls
    # Float32 sums of 32 numbers of size 10.
    assert (found - exact).abs().max() < 1e-4
