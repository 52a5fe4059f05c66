"""Uneven shares of a whole: how many rows each rank gets, without a rule of divisibility.

Numbers only, no tensors. Every rank computes all shares by itself and they must come out alike, so
nothing here rounds: weights are taken as exact fractions. Read next: `grid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from everyframe.core.errors import InputError


def shares(length: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`length` in whole parts as near to `weights` as can be; their sum is `length`.

    By largest remainders: no part is a whole one away from its exact share, equal weights give
    parts that differ by one at most, a weight of 0 gives 0. Ties go to whoever comes first.

    Raises:
        InputError: a weight is below 0 or not finite, or none is above 0.
    """
    exact = _fractions(weights)
    whole = sum(exact)
    ideal = [length * weight / whole for weight in exact]
    parts = [part.numerator // part.denominator for part in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: parts[i] - ideal[i])
    for i in by_remainder[: length - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def spans(length: int, weights: Sequence[float], start: int = 0) -> tuple[range, ...]:
    """`shares` as ranges one behind the other, from `start` on."""
    bounds = accumulate(shares(length, weights), initial=start)
    return tuple(range(low, high) for low, high in pairwise(bounds))


def teams(num_ranks: int, loads: Sequence[float], weights: Sequence[float]) -> tuple[range, ...]:
    """Ranks in consecutive teams, one for each of `loads`, so that the slowest is done soonest.

    No team is empty. `weights` are the ranks' speeds.

    Raises:
        InputError: there are fewer ranks than loads.
    """
    if num_ranks < len(loads):
        raise InputError(f"{num_ranks} ranks can't be parted into {len(loads)}; give as many ranks")
    exact = _fractions(weights)
    behind = [Fraction(0), *accumulate(exact)]

    def slowest(cuts: tuple[int, ...]) -> tuple[Fraction, ...]:
        bounds = (0, *cuts, num_ranks)
        speeds = [behind[high] - behind[low] for low, high in pairwise(bounds)]
        times = [
            Fraction(load) / speed if speed else Fraction(10**18)
            for load, speed in zip(loads, speeds, strict=True)
        ]
        return tuple(sorted(times, reverse=True))

    best = min(combinations(range(1, num_ranks), len(loads) - 1), key=slowest)
    bounds = (0, *best, num_ranks)
    return tuple(range(low, high) for low, high in pairwise(bounds))


def _fractions(weights: Sequence[float]) -> list[Fraction]:
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise InputError(
            f"shares must be numbers of 0 or more, one of them above 0, got {list(weights)}"
        )
    return [Fraction(weight) for weight in weights]
