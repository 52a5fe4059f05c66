"""Open-Sora's denoisers on several ranks: the bytes that they send.

What holds for every family is in `test_contract_distributed.py`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from everyframe.parallel.communicator import FakeCommunicator
from everyframe.parallel.token_partition import TokenGrid
from helpers.sharded_denoisers.opensora import DEPTH, HIDDEN, OpenSora


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_bytes_are_two_units_a_pair(version: str, size: int) -> None:
    """A unit is tokens * width * bytes * (P - 1) / P^2; counted by ranks that are imagined.

    That real ones send the same is in the contract. Sizes that divide by all.
    """
    grid, pairs = TokenGrid(1, 12, 36), DEPTH
    unit = Fraction(grid.num_tokens * HIDDEN * 8 * (size - 1), size**2)
    group = FakeCommunicator(0, (1.0,) * size)
    sent = OpenSora(version).sharded(group, "sizes that divide")["sent"]
    last = sent.pop("the last projection is gathered")
    assert sum(sent.values()) == 2 * pairs * unit
    # 8 channels of a 1x2x2 patch, once, of this rank's tokens, to each other one.
    assert last == grid.num_tokens // size * 32 * 8 * (size - 1)
