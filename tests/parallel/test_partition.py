"""Shares add up, are as near to their weights as whole numbers can be, and are alike everywhere."""

from __future__ import annotations

from fractions import Fraction

import pytest

from everyframe.core.errors import InputError
from everyframe.parallel.partition import shares, spans, teams


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 1024])
def test_equal_shares_differ_by_one_at_most(length: int, parts: int) -> None:
    found = shares(length, [1.0] * parts)
    assert sum(found) == length
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)  # ties go to whoever comes first


@pytest.mark.parametrize("weights", [(24, 8), (1, 0, 1), (0.1, 0.2, 0.3), (3, 1, 1, 1, 1)])
@pytest.mark.parametrize("length", [1, 7, 100, 1023])
def test_shares_follow_weights(length: int, weights: tuple[float, ...]) -> None:
    found = shares(length, weights)
    assert sum(found) == length
    for part, weight in zip(found, weights, strict=True):
        ideal = length * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(part - ideal) < 1
        assert weight or not part


@pytest.mark.parametrize("weights", [(), (0, 0), (1, -1), (float("nan"), 1), (float("inf"),)])
def test_weights_that_say_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="shares must be numbers"):
        shares(5, weights)


def test_spans_lie_one_behind_the_other() -> None:
    assert spans(7, [1, 1, 1], start=10) == (range(10, 13), range(13, 15), range(15, 17))


@pytest.mark.parametrize(
    ("weights", "loads", "expected"),
    [
        ((1, 1), (1, 1), (range(1), range(1, 2))),
        ((1, 1, 1), (1, 1), (range(1), range(1, 3))),
        ((1, 1, 1), (2, 1), (range(2), range(2, 3))),
        ((1, 1, 2), (1, 1), (range(2), range(2, 3))),  # two slow ones beside a fast one
        ((1,) * 5, (1, 1), (range(2), range(2, 5))),
    ],
)
def test_teams_end_together(
    weights: tuple[float, ...], loads: tuple[float, ...], expected: tuple[range, ...]
) -> None:
    assert teams(len(weights), loads, weights) == expected


def test_fewer_ranks_than_loads_are_refused() -> None:
    with pytest.raises(InputError, match="1 ranks can't be parted into 2"):
        teams(1, [1, 1], [1])
