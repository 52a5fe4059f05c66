"""Parameter matrices for pytest: a diagonal runs by default, the rest is marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonal(*axes: Iterable[Any], shift: int = 0) -> list[Any]:
    """All combinations of the axes' values, for ``parametrize``; those off the diagonal are slow.

    Each value of each axis is on the diagonal, which goes around the shorter axes; `shift` begins
    further along the last. So a fault of one value is seen by the fast set, and one of two values
    together by the whole.
    """
    values = [[*axis] for axis in axes]
    lengths = [len(axis) for axis in values]
    on_it = {
        (*(turn % length for length in lengths[:-1]), (turn + shift) % lengths[-1])
        for turn in range(max(lengths))
    }
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in on_it else pytest.mark.slow,
        )
        for places in product(*map(range, lengths))
    ]
