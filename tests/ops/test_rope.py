"""Rotary embedding against diffusers' and against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

from everyframe.ops.rope import RotaryEmbedding, Rotate, rotary_table, rotate


def test_equals_diffusers() -> None:
    x = torch.randn(2, 3, 20, 72)
    theirs = get_1d_rotary_pos_embed(72, 20, use_real=True, freqs_dtype=torch.float64)
    expected = apply_rotary_emb(x, theirs)
    # Both are float32 sums of two products of numbers below 5.
    torch.testing.assert_close(rotate(x, rotary_table(20, 72)), expected, atol=3e-6, rtol=0)


def test_equals_a_complex_product() -> None:
    x = torch.randn(2, 100, 16, dtype=torch.float64)
    turns = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = torch.outer(torch.arange(100.0, dtype=torch.float64), turns)
    factor = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * factor).flatten(-2)
    table = rotary_table(100, 16, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, table), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_costs_one_rounding_at_far_positions(dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 3000, 64).to(dtype)
    table = RotaryEmbedding(64)(3000, dtype, torch.device("cpu"))
    assert table.cos.dtype == table.sin.dtype == torch.float32
    out = Rotate()(x, table)
    assert out.dtype == dtype
    exact = rotate(x.double(), rotary_table(3000, 64, dtype=torch.float64))
    # Half a unit in the last place of numbers up to 8; angles in bfloat16 would be off by radians.
    tolerance = 8 * torch.finfo(dtype).eps / 2 + 1e-5
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=0)


def test_positions_may_be_any_numbers() -> None:
    whole, some = rotary_table(10, 8), rotary_table(torch.tensor([3, 7]), 8)
    assert some.cos.equal(whole.cos[[3, 7]])
    assert some.sin.equal(whole.sin[[3, 7]])


def test_gradients_flow() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    table = rotary_table(5, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), (x,))
