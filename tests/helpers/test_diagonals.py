"""What is on a diagonal: each value at least once, and of the combinations no more than needed."""

from __future__ import annotations

import pytest

from helpers.diagonals import diagonal


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_each_value_is_in_the_fast_set(shift: int) -> None:
    axes = ["abc", (1, 2), ("x",)]
    found = diagonal(*axes, shift=shift)
    assert len({each.values for each in found}) == 3 * 2 * 1 == len(found)
    fast = [each.values for each in found if not each.marks]
    assert len(fast) == 3
    assert [set(values) for values in zip(*fast, strict=True)] == [{*axis} for axis in axes]


def test_a_shift_begins_further_along_the_last() -> None:
    fast = [each.values for each in diagonal("ab", (1, 2), shift=1) if not each.marks]
    assert fast == [("a", 2), ("b", 1)]
