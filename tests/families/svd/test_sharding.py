"""The video UNet on several ranks: its bytes, and ranks without frames.

What holds for every family is in `test_contract_distributed.py`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from everyframe.families.svd.sharding import ShardedFrames
from everyframe.parallel.communicator import FakeCommunicator
from helpers.sharded_denoisers import DENOISERS

UNET = DENOISERS["svd"]


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_two_units_a_temporal_block(size: int) -> None:
    """A unit is tokens * width * bytes * (P - 1) / P^2 at the block's level.

    One batch of frames and places that divide; counted by ranks that are imagined. That real ones
    send the same is in the contract.
    """
    sent = UNET.sharded(FakeCommunicator(0, (1.0,) * size), "sizes that divide")["sent"]
    # Numbers a pixel that are dealt with in time: resnets, then layers of attention, by level. Two
    # resnets on the way up for each one on the way down; two more in the middle with one attention.
    wide = {64: 32 * 3 + 32 * 3, 16: 64 * 3 + 64 * 3 * 2, 4: 64 * 3 + 64 * 2 + 64 * 1}
    tokens = 4 * sum(places * width for places, width in wide.items())
    unit = Fraction(tokens * 8 * (size - 1), size**2)
    assert sent["frames are gathered"] == sent["frames are given back"] == unit
    # Two norms in each of 11 resnets, a mean and a variance of 32 groups, to each other rank.
    assert sent["statistics are merged"] == 11 * 2 * 2 * 32 * 8 * (size - 1)
    assert sent["the answer is gathered"] == 4 * 4 * 64 * 8 * (size - 1) // size


def test_ranks_beyond_the_frames_have_pixels_only() -> None:
    dealt = ShardedFrames((1, 2), [12, 6], FakeCommunicator(3, (1.0,) * 5), 1)
    assert dealt.take(torch.zeros(1, 2, 8, 3, 4)).shape == (1, 0, 8, 3, 4)
    assert dealt.over_time(torch.zeros(1, 0, 12, 4)).shape == (1, 2, 2, 4)
