"""What one reduction tells of tensors, in every floating dtype and inside of anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from everyframe.numerics.tensor_stats import blank_frames, iter_tensors, value_range

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_bad_value_is_seen_anywhere(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.linspace(-3, 4, 1000).to(dtype)
    assert value_range(values).is_finite
    assert (value_range(values).low, value_range(values).high, value_range(values).largest) == (
        -3,
        4,
        4,
    )
    values[place] = bad
    assert not value_range(values).is_finite
    assert not value_range((torch.ones(2), {"x": values})).is_finite


@dataclass(frozen=True)
class Holder:
    """As a family keeps what it knows of a text."""

    inner: tuple[Tensor, ...]
    mask: Tensor
    missing: Tensor | None = None


def test_tensors_are_found_inside_of_anything() -> None:
    floats, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    holder = Holder((floats, floats), mask)
    found = list(iter_tensors([holder, {"a": floats}, None, 3, "x", torch.zeros(0)]))
    assert len(found) == 3
    assert value_range(mask) == value_range(())
    assert value_range(()).is_finite


def test_blank_frames() -> None:
    pixels = torch.rand(5, 3, 4, 4)
    pixels[1] = -1.7  # all of it below black
    pixels[3] = 0.25
    pixels[4] = torch.tensor([0.9, 0.0, 0.0])[:, None, None]  # all of it red
    assert blank_frames(pixels, -1, 1, 2 / 255) == [1, 3, 4]
    pixels[4, 1, 2, 2] = 0.5  # but for one value of its green
    assert blank_frames(pixels, -1, 1, 2 / 255) == [1, 3]
