"""The first of several that will do, found with few tries: a dry run takes a good part of a second.

Here are numbers alone. What is tried is `fitting`'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

#: So many tries go by sizes alone.
_BY_SIZE = 4


def first_that_holds(number: int, holds: Callable[[int], bool]) -> int:
    """The first of 0 .. number - 1 that holds, where all after one that does do too; or number."""
    low, high = 0, number
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def first_that_fits(sizes: Sequence[float], excess: Callable[[int], float], size: float) -> int:
    """The first of these falling `sizes` whose `excess` is at most 1; or how many there are.

    `excess` is how many times as much is needed as there is. Most of it grows with the size, so
    each answer tells about where the first must be; `size` is where to look to begin with. After
    some tries every other one halves what is left, as others may come nearer by little.
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
    """The size whose excess is 1, on the line through these (size, excess), or in proportion.

    0 where nothing is known of it, as a tensor is beyond what can be addressed.
    """
    size, excess = found
    if before is not None and math.isfinite(before[1]):
        rise = (excess - before[1]) / (size - before[0])
        if 0 < rise < math.inf:
            return size + (1 - excess) / rise
    return size / excess if excess else size
