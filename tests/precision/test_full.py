"""Float32 is neither cut to TF32 nor to bfloat16 within, and all is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from everyframe.precision.full import full_float32


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def precisions() -> list[str]:
    backends = torch.backends
    operations = (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.matmul)
    return [operation.fp32_precision for operation in operations]


@pytest.mark.parametrize("elsewhere", ["highest", "high", "medium"])
def test_full_within_and_as_it_was_afterwards(elsewhere: str) -> None:
    torch.set_float32_matmul_precision(elsewhere)
    before = precisions()
    assert before[0] == "tf32", "PyTorch's default, which makes this needed"
    with full_float32():
        assert precisions() == ["ieee"] * 3
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == elsewhere


def test_sums_of_half_precision_products_are_wide_within() -> None:
    products = torch.backends.cuda.matmul
    assert products.allow_fp16_reduced_precision_reduction, "PyTorch's default"
    with full_float32():
        assert not products.allow_fp16_reduced_precision_reduction
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_accumulation
    assert products.allow_fp16_reduced_precision_reduction
    assert products.allow_bf16_reduced_precision_reduction


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_convolution_on_a_card_has_float32s_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, 32, 32, generator=generator)
    weight = torch.randn(256, 256, 3, 3, generator=generator)
    exact = torch.nn.functional.conv2d(x.double(), weight.double())
    with full_float32():
        got = torch.nn.functional.conv2d(x.cuda(), weight.cuda()).cpu().double()
    # TF32 keeps 10 bits and is off by about 3e-4 of the largest value here, float32 by 1e-6.
    assert (got - exact).abs().max() / exact.abs().max() < 2e-5
