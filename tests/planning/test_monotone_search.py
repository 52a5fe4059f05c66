"""The first that will do is found, and with few tries, as each is a dry run."""

from __future__ import annotations

import math

import pytest

from everyframe.planning.monotone_search import first_that_fits, first_that_holds


def test_the_first_that_holds_is_found_by_halving() -> None:
    for number in range(6):
        for first in range(number + 1):
            asked: list[int] = []

            def holds(index: int, first: int = first, asked: list[int] = asked) -> bool:
                asked.append(index)
                return index >= first

            assert first_that_holds(number, holds) == first
            assert len(asked) <= 3, "of five or fewer"


#: As videos become smaller: each three quarters, from 10^9 pixels down to 10^3.
SIZES = [10**9 * 0.75**i for i in range(48)]


def tries(needs: list[float], begin: float) -> int:
    """How many were tried for the first that needs at most 1, which is found."""
    asked: list[int] = []

    def excess(index: int) -> float:
        asked.append(index)
        return needs[index]

    right = next((i for i, need in enumerate(needs) if need <= 1), len(needs))
    assert first_that_fits(SIZES, excess, begin) == right
    assert len(set(asked)) == len(asked), "each once"
    return len(asked)


@pytest.mark.parametrize("room", [1e2, 1e3, 3e5, 7e8, 1e9, 1e12])
def test_what_grows_with_size_takes_few_tries(room: float) -> None:
    assert tries([size / room for size in SIZES], room) <= 2
    # Where only some of it does, the guess is off, and corrected.
    assert tries([0.5 + size / room for size in SIZES], room) <= 6


@pytest.mark.parametrize("begin", [0.0, 1e3, 1e6, 2e9])
@pytest.mark.parametrize("first", range(0, 49, 6))
def test_whatever_is_needed_it_takes_no_more_than_thrice_halving(first: int, begin: float) -> None:
    steps = [9.9 if i < first else 0.1 for i in range(48)]
    assert tries(steps, begin) <= 18
    beyond = [math.inf if i < first else 0.0 for i in range(48)]
    assert tries(beyond, begin) <= 18
    near = [1 + 1e-9 if i < first else 1 - 1e-9 for i in range(48)]
    assert tries(near, begin) <= 18
