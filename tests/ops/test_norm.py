"""Norms against their formulas in float64, and where a careless formula overflows."""

from __future__ import annotations

import pytest
import torch

from everyframe.ops.norm import LayerNorm, RMSNorm, layer_norm, rms_norm, widen_norms

# Unit roundoff of each dtype, times two: one rounding of the result and what float32 leaves.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm_equals_its_formula(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, 72).to(dtype), (torch.rand(72) + 0.5).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm(x, weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=1e-9, rtol=TOLERANCE[dtype])


def test_rms_norm_equals_pytorchs_with_gradients() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(3, 8, dtype=torch.float64)
    ours = torch.autograd.grad((rms_norm(x, weight) * factor).sum(), (x, weight))
    theirs_out = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    theirs = torch.autograd.grad((theirs_out * factor).sum(), (x, weight))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_squares_of_large_float16_numbers_do_not_overflow(value: float) -> None:
    x = torch.full((1, 64), value, dtype=torch.float16)
    out = RMSNorm(64).half()(x)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-3, rtol=0)


def test_zeros_stay_zero() -> None:
    zeros = torch.zeros(1, 64)
    assert RMSNorm(64)(zeros).equal(zeros)
    assert LayerNorm()(zeros).equal(zeros)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_layer_norm_equals_its_formula(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 5, 64) * 3 + 1).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    out = layer_norm(x)
    assert out.dtype == dtype
    # Near the mean a difference of two rounded numbers is left, hence an absolute tolerance too.
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# In the place of a foreign module's norms.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wide_norms_keep_the_dtype_of_what_they_are_given(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.ModuleDict(
        {"group": torch.nn.GroupNorm(4, 16), "row": torch.nn.LayerNorm(16)}
    )
    for parameter in module.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    wanted = {name: module[name] for name in module}
    widen_norms(module)
    x = torch.randn(2, 16, 6, 5, generator=generator) * 100 + 300
    for name, given in (("group", x), ("row", x.permute(0, 2, 3, 1))):
        narrow = given.to(dtype)
        found = module[name](narrow)
        assert found.dtype == dtype
        exact = wanted[name].double()(narrow.double())
        # One rounding at the end, and in between sums of float32.
        allowed = torch.finfo(dtype).eps + 2e-5
        assert ((found.double() - exact).abs() / (exact.abs() + 1)).max() < allowed
        assert type(module[name]).__name__.startswith("Wide")
        wanted[name].float()
