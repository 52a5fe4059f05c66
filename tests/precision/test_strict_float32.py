"""Float32 is neither cut to TF32 nor to bfloat16 within, and all is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from everyframe.precision.strict_float32 import strict_float32


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def precisions() -> list[str]:
    backends = torch.backends
    operations = (
        backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul,
    )  # fmt: skip
    return [operation.fp32_precision for operation in operations]


@pytest.mark.parametrize("elsewhere", ["highest", "high", "medium"])
def test_full_within_and_as_it_was_afterwards(elsewhere: str) -> None:
    torch.set_float32_matmul_precision(elsewhere)
    before = precisions()
    assert before[0] == "tf32", "PyTorch's default, which makes this needed"
    with strict_float32():
        assert precisions() == ["ieee"] * 4
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == elsewhere


@pytest.mark.parametrize("elsewhere", ["highest", "high", "medium"])
def test_whoever_asks_for_the_old_switches_gets_an_answer(elsewhere: str) -> None:
    """torch refuses one where old and new switches disagree, and has code that asks."""
    torch.set_float32_matmul_precision(elsewhere)
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32
    with strict_float32():
        assert (products.allow_tf32, cudnn.allow_tf32) == (False, False)
        assert torch.get_float32_matmul_precision() == "highest"
        with cudnn.flags(enabled=False):
            assert not cudnn.enabled
    assert (products.allow_tf32, cudnn.allow_tf32) == before


def test_what_somebody_mixed_stays_as_it_was() -> None:
    """New switches that disagree with the old ones, which then can't be asked."""
    cudnn = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    try:
        with pytest.raises(RuntimeError):
            _ = cudnn.allow_tf32
        with strict_float32():
            assert not cudnn.allow_tf32
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", "tf32")
    finally:
        cudnn.conv.fp32_precision = "tf32"


def test_sums_of_half_precision_products_are_wide_within() -> None:
    products = torch.backends.cuda.matmul
    assert products.allow_fp16_reduced_precision_reduction, "PyTorch's default"
    with strict_float32():
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
    with strict_float32():
        got = torch.nn.functional.conv2d(x.cuda(), weight.cuda()).cpu().double()
    # TF32 keeps 10 bits and is off by about 3e-4 of the largest value here, float32 by 1e-6.
    assert (got - exact).abs().max() / exact.abs().max() < 2e-5
