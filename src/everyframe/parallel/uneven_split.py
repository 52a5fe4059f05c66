"""Uneven shares of a whole: how many rows each rank gets, without a rule of divisibility.

Numbers only, no tensors. Every rank computes all shares by itself and they must come out alike, so
nothing here rounds: weights are taken as exact fractions. Read next: `grid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from everyframe.core.errors import InputError

#: How long a team takes that has no speed at all.
_NEVER = Fraction(10**18)


def uneven_sizes(length: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`length` in whole parts as near to `weights` as can be; their sum is `length`.

    By largest remainders: no part is a whole one away from its exact share, equal weights give
    parts that differ by one at most, a weight of 0 gives 0. Ties go to whoever comes first.

    Raises:
        InputError: a weight is below 0 or not finite, or none is above 0.
    """
    return _shares(length, tuple(weights))


# Each rank asks for the same ones, and so does whoever plans for all of them.
@lru_cache(maxsize=256)
def _shares(length: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    exact = _fractions(weights)
    whole = sum(exact)
    ideal = [length * weight / whole for weight in exact]
    parts = [part.numerator // part.denominator for part in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: parts[i] - ideal[i])
    for i in by_remainder[: length - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def uneven_ranges(length: int, weights: Sequence[float], start: int = 0) -> tuple[range, ...]:
    """`uneven_sizes` as ranges one behind the other, from `start` on."""
    bounds = accumulate(uneven_sizes(length, weights), initial=start)
    return tuple(range(low, high) for low, high in pairwise(bounds))


def group_ranks(
    num_ranks: int, loads: Sequence[float], weights: Sequence[float]
) -> tuple[range, ...]:
    """Ranks in consecutive teams, one for each of `loads`, so that the slowest is done soonest.

    No team is empty. `weights` are the ranks' speeds.

    Raises:
        InputError: there are fewer ranks than loads.
    """
    if num_ranks < len(loads):
        raise InputError(f"{num_ranks} ranks can't be parted into {len(loads)}; give as many ranks")
    return _teams(num_ranks, tuple(loads), tuple(weights))


@lru_cache(maxsize=256)
def _teams(
    num_ranks: int, loads: tuple[float, ...], weights: tuple[float, ...]
) -> tuple[range, ...]:
    behind = [Fraction(0), *accumulate(_fractions(weights))]

    def time(load: float, start: int, stop: int) -> Fraction:
        speed = behind[stop] - behind[start]
        return Fraction(load) / speed if speed else _NEVER

    # From the last load to the first: best[start] is how the ranks from `start` on have the loads
    # from this one on, as times, slowest first, and where each team ends. Of two ways for the same
    # ranks the better one stays so beside any team before them, so no other has to be kept.
    best: dict[int, tuple[list[Fraction], list[int]]] = {num_ranks: ([], [])}
    for number in reversed(range(len(loads))):
        found: dict[int, tuple[list[Fraction], list[int]]] = {}
        # Each load before this one has a rank at least, and the first one begins with the first.
        for start in range(number, num_ranks) if number else (0,):
            for stop, (times, ends) in best.items():
                if stop <= start:
                    continue
                slowest = sorted([*times, time(loads[number], start, stop)], reverse=True)
                if start not in found or slowest < found[start][0]:
                    found[start] = slowest, [stop, *ends]
        best = found
    bounds = (0, *best[0][1])
    return tuple(range(low, high) for low, high in pairwise(bounds))


def _fractions(weights: Sequence[float]) -> list[Fraction]:
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise InputError(
            f"shares must be numbers of 0 or more, one of them above 0, got {list(weights)}"
        )
    return [Fraction(weight) for weight in weights]
