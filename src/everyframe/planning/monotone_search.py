"""Find the first fitting candidate of a monotone sequence with few dry runs (up to 1 s each).

Pure numbers; `memory_fit.py` supplies the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

#: Number of tries placed by interpolation alone.
_BY_SIZE = 4


def first_that_holds(number: int, holds: Callable[[int], bool]) -> int:
    """The first of 0 .. number - 1 for which `holds` is true, or `number`.

    If one holds, all later ones do.
    """
    low, high = 0, number
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def first_that_fits(sizes: Sequence[float], excess: Callable[[int], float], size: float) -> int:
    """Index of the first of these falling `sizes` whose `excess` is at most 1, or their number.

    `excess` is required over available memory. It mostly grows with size, so each answer predicts
    where the first fit is; the search begins near `size`. After some tries every other one bisects,
    since prediction may converge slowly.
    """
    low, high = 0, len(sizes)
    before: tuple[float, float] | None = None
    for tries in count(1):
        if low >= high:
            break
        place = (low + high) // 2
        if size > 0 and (tries <= _BY_SIZE or tries % 2):
            place = next((i for i in range(low, high) if sizes[i] <= size), high - 1)
        found = sizes[place], excess(place)
        if found[1] <= 1:
            high = place
        else:
            low = place + 1
        size = _where_one_is(found, before)
        before = found
    return low


def _where_one_is(found: tuple[float, float], before: tuple[float, float] | None) -> float:
    """The size with an excess of 1, by the line through two (size, excess) points or in proportion.

    0 if unknown, because a tensor exceeds what can be addressed.
    """
    size, excess = found
    if before is not None and math.isfinite(before[1]):
        rise = (excess - before[1]) / (size - before[0])
        if 0 < rise < math.inf:
            return size + (1 - excess) / rise
    return size / excess if excess else size
