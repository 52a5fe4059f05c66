"""Split a length into uneven shares, one per rank, without divisibility rules.

Numbers only, no tensors. Every rank computes all shares itself and must get the same ones, so
nothing here rounds: weights are exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from everyframe.core.errors import InputError

#: Time of a group without any speed.
_NEVER = Fraction(10**18)


def uneven_sizes(length: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `length` into whole parts as close to `weights` as possible; they sum to `length`.

    Largest remainder method: every part is less than 1 away from its exact share, equal weights
    give parts that differ by at most 1, a weight of 0 gives 0. Ties go to the first.

    Raises:
        InputError: a weight is below 0 or not finite, or none is above 0.
    """
    return _shares(length, tuple(weights))


# Every rank and the planner ask for the same splits.
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
    """`uneven_sizes` as consecutive ranges from `start`."""
    bounds = accumulate(uneven_sizes(length, weights), initial=start)
    return tuple(range(low, high) for low, high in pairwise(bounds))


def group_ranks(
    num_ranks: int, loads: Sequence[float], weights: Sequence[float]
) -> tuple[range, ...]:
    """Group consecutive ranks, one group per load, so that the slowest group finishes earliest.

    No group is empty. `weights` are the ranks' speeds.

    Raises:
        InputError: there are fewer ranks than loads.
    """
    if num_ranks < len(loads):
        raise InputError(f"{num_ranks} ranks can't be split into {len(loads)}; give as many ranks")
    return _groups(num_ranks, tuple(loads), tuple(weights))


@lru_cache(maxsize=256)
def _groups(
    num_ranks: int, loads: tuple[float, ...], weights: tuple[float, ...]
) -> tuple[range, ...]:
    behind = [Fraction(0), *accumulate(_fractions(weights))]

    def time(load: float, start: int, stop: int) -> Fraction:
        speed = behind[stop] - behind[start]
        return Fraction(load) / speed if speed else _NEVER

    # From the last load to the first: best[start] is how ranks from `start` on have the loads from
    # this one on, as times, slowest first, and where each group ends. The better of two ways for
    # the same ranks stays better beside any group before them.
    best: dict[int, tuple[list[Fraction], list[int]]] = {num_ranks: ([], [])}
    for number in reversed(range(len(loads))):
        found: dict[int, tuple[list[Fraction], list[int]]] = {}
        # Each load before this one has at least one rank; the first load begins with the first
        # rank.
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


def assign_pieces(num_pieces: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Rank of each piece: the one that would finish it first, in the order of the pieces."""
    speeds = [Fraction(weight) for weight in weights]
    done = [Fraction(0)] * len(speeds)
    chosen = []
    for _ in range(num_pieces):
        best = min(
            (rank for rank, speed in enumerate(speeds) if speed),
            key=lambda rank: done[rank] + 1 / speeds[rank],
        )
        done[best] += 1 / speeds[best]
        chosen.append(best)
    return tuple(chosen)


def _fractions(weights: Sequence[float]) -> list[Fraction]:
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise InputError(
            f"shares must be numbers of 0 or more, one of them above 0, got {list(weights)}"
        )
    return [Fraction(weight) for weight in weights]
