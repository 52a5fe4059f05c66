"""The measure itself: worked numbers, and the ways in which a bad result could look good."""

from __future__ import annotations

import math

import pytest
import torch

from everyframe.numerics.tensor_stats import Difference, largest_error

NAN, INF = math.nan, math.inf


def error(got: list[float], want: list[float]) -> Difference:
    return largest_error(torch.tensor(got), torch.tensor(want))


def test_absolute_and_relative() -> None:
    assert error([1.0, 5.0], [2.0, -8.0]) == Difference(13.0, 13.0 / 8.0)
    assert error([1.0], [1.0]) == Difference(0.0, 0.0)
    assert error([0.0], [0.0]) == Difference(0.0, 0.0)
    assert error([], []) == Difference(0.0, 0.0)
    assert error([0.5], [0.0]) == Difference(0.5, INF)


@pytest.mark.parametrize(
    ("got", "want"), [([NAN], [1.0]), ([INF], [1.0]), ([INF], [-INF]), ([1.0], [NAN])]
)
def test_bad_values_are_infinitely_far(got: list[float], want: list[float]) -> None:
    assert error([1.0, *got], [1.0, *want]) == Difference(INF, INF)


def test_the_same_bad_values_are_the_same() -> None:
    assert error([NAN, INF, 1.0], [NAN, INF, 2.0]) == Difference(1.0, 0.5)


def test_other_dtypes_are_compared_in_float64() -> None:
    got = torch.tensor([2**24 + 1], dtype=torch.int64)
    want = torch.tensor([2**24], dtype=torch.int64)
    assert largest_error(got, want).absolute == 1.0
    assert largest_error(torch.tensor([60000.0]).half(), torch.tensor([-6e4])).absolute == 120000.0


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"got \(1,\), want \(2,\)"):
        error([1.0], [1.0, 1.0])


def test_reads_well() -> None:
    assert str(Difference(1.25e-5, 0.5)) == "absolute 1.25e-05, relative 5.00e-01"
