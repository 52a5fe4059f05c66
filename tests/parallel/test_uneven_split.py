"""Shares add up, are as near to their weights as whole numbers can be, and are alike everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise

import pytest

from everyframe.core.errors import InputError
from everyframe.parallel.uneven_split import group_ranks, uneven_ranges, uneven_sizes


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 1024])
def test_equal_shares_differ_by_one_at_most(length: int, parts: int) -> None:
    found = uneven_sizes(length, [1.0] * parts)
    assert sum(found) == length
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)  # ties go to whoever comes first


@pytest.mark.parametrize("weights", [(24, 8), (1, 0, 1), (0.1, 0.2, 0.3), (3, 1, 1, 1, 1)])
@pytest.mark.parametrize("length", [1, 7, 100, 1023])
def test_shares_follow_weights(length: int, weights: tuple[float, ...]) -> None:
    found = uneven_sizes(length, weights)
    assert sum(found) == length
    for part, weight in zip(found, weights, strict=True):
        ideal = length * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(part - ideal) < 1
        assert weight or not part


@pytest.mark.parametrize("weights", [(), (0, 0), (1, -1), (float("nan"), 1), (float("inf"),)])
def test_weights_that_say_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="shares must be numbers"):
        uneven_sizes(5, weights)


def test_spans_lie_one_behind_the_other() -> None:
    assert uneven_ranges(7, [1, 1, 1], start=10) == (range(10, 13), range(13, 15), range(15, 17))


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
def test_groups_end_together(
    weights: tuple[float, ...], loads: tuple[float, ...], expected: tuple[range, ...]
) -> None:
    assert group_ranks(len(weights), loads, weights) == expected


def _times(loads: Sequence[int], weights: Sequence[int], cuts: Sequence[int]) -> list[Fraction]:
    """How long each group takes where ranks are cut there, the slowest first."""
    bounds = pairwise([0, *cuts, len(weights)])
    speeds = [sum(weights[low:high]) for low, high in bounds]
    pairs = zip(loads, speeds, strict=True)
    return sorted((Fraction(load, speed) for load, speed in pairs), reverse=True)


def test_groups_are_the_best_of_all_that_there_are() -> None:
    """Held against every way to cut, by the times of all groups and not of the slowest alone."""
    draw = random.Random(0)
    for _ in range(60):
        num_ranks = draw.randint(1, 6)
        loads = [draw.choice([1, 2, 3]) for _ in range(draw.randint(1, num_ranks))]
        weights = [draw.choice([1, 1, 2, 5]) for _ in range(num_ranks)]

        every = combinations(range(1, num_ranks), len(loads) - 1)
        best = min(every, key=partial(_times, loads, weights))
        assert [group.stop for group in group_ranks(num_ranks, loads, weights)] == [
            *best,
            num_ranks,
        ]


def test_many_ranks_are_parted_at_once() -> None:
    """There are 300 million ways to cut these: what looks at each of them does not come back."""
    assert [len(group) for group in group_ranks(32, [1.0] * 16, [1.0] * 32)] == [2] * 16


def test_fewer_ranks_than_loads_are_refused() -> None:
    with pytest.raises(InputError, match="1 ranks can't be split into 2"):
        group_ranks(1, [1, 1], [1])
