"""Fingerprints: what they say of one tensor, and of the difference of two."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from everyframe.numerics.trace import fingerprint as module
from everyframe.numerics.trace.fingerprint import difference, fingerprint, is_mask

SHAPES = [(5,), (17,), (256,), (2, 64, 144), (1, 4, 16, 24, 24), (3, 700, 600)]


def numbers(tensor: Tensor) -> np.ndarray:
    return fingerprint(tensor).double().numpy()


def apart(a: Tensor, b: Tensor) -> float:
    return difference(numbers(a), numbers(b))


def truth(a: Tensor, b: Tensor) -> float:
    """The relative difference, from all elements, in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / max(a.norm(), b.norm()))


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_range_mean_and_norm(shape: tuple[int, ...]) -> None:
    x = drawn(shape)
    low, high, mean, norm, *_ = numbers(x)
    assert (low, high) == (float(x.min()), float(x.max()))
    # Sums of up to a million terms in float32: 1e-5 is ten times what was seen.
    assert mean == pytest.approx(float(x.double().mean()), abs=1e-5)
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-5, 1e-2, 0.5])
@pytest.mark.parametrize("kind", ["spread", "the same everywhere", "one channel", "one element"])
def test_the_difference_is_estimated(shape: tuple[int, ...], size: float, kind: str) -> None:
    x = drawn(shape)
    y = x.clone()
    if kind == "spread":
        y += size * drawn(shape, seed=1)
    elif kind == "the same everywhere":
        y += size
    elif kind == "one channel":
        y[..., 0] += 10 * size
    else:
        y.view(-1)[0] += 100 * size
    if truth(x, y) < 1e-6:
        pytest.skip("less than what sums in float32 keep")
    # 17 buckets: a sixth of it is a standard deviation, a fourth where all signs act together.
    assert 0.4 < apart(x, y) / truth(x, y) < 2


def test_equal_bits_do_not_differ_and_rounding_is_seen_as_it_is() -> None:
    x = drawn((3, 100, 64))
    assert apart(x, x.clone()) == 0
    for dtype in (torch.bfloat16, torch.float16):
        assert apart(x, x.to(dtype)) == pytest.approx(truth(x, x.to(dtype)), rel=0.5)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn((3, 300, 200))
    whole = numbers(x)
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    assert numbers(x) == pytest.approx(whole, rel=1e-4, abs=1e-3)


def test_how_it_lies_in_memory_makes_no_difference() -> None:
    x = drawn((4, 30, 20))
    assert apart(x, x.transpose(0, 2).contiguous().transpose(0, 2)) == 0


def test_the_signs_are_the_same_for_good() -> None:
    # What a trace of another version or device holds must stay comparable.
    x = torch.arange(100, dtype=torch.float32)
    sketch = [-3, -15, -21, 45, -49, 7, 3, -3, -99, 113, 123, 275, -297, 321, -179, -179, -4]
    assert numbers(x)[4:].astype(int).tolist() == sketch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_alone(bad: float) -> None:
    x = drawn((100,))
    y = x.clone()
    y[7] = bad
    assert apart(x, y) == math.inf
    assert apart(y, y) == 0


def test_masks_are_equal_in_every_dtype() -> None:
    masks = [
        torch.tensor([0.0, low, 0.0, 0.0], dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for low in (torch.finfo(dtype).min, -1e4, -math.inf)
    ]
    assert all(is_mask(numbers(mask)) for mask in masks)
    assert all(apart(a, b) == 0 for a in masks for b in masks)
    assert not is_mask(numbers(drawn((50,)) * 1e5))


def test_whole_numbers_and_complex_ones() -> None:
    ids = torch.tensor([[3, 5, 7]])
    assert apart(ids, ids.clone()) == 0
    assert apart(ids, torch.tensor([[3, 5, 8]])) > 0.05
    z = torch.complex(drawn((40,)), drawn((40,), seed=1))
    assert apart(z, z * (1 + 1e-3j)) == pytest.approx(1e-3, rel=0.6)


def test_large_numbers_are_compared_by_their_range() -> None:
    x = drawn((50,)) * 1e30
    assert apart(x, x) == 0
    assert apart(x, 2 * x) == pytest.approx(0.5)
