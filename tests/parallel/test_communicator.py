"""What a failed exchange says: another rank is gone, or this one's own device is lost or full."""

from __future__ import annotations

import pytest
import torch

from everyframe.core.errors import PeerLostError
from everyframe.parallel.communicator import SingleRank

NCCL = "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9\nLast error:\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        # NCCL's own buffers, which come with the first exchange of a group.
        RuntimeError(f"{NCCL}Failed to CUDA calloc async 24 bytes"),
        RuntimeError(f"{NCCL}Cuda failure 'out of memory'"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_failure_of_its_own_is_not_blamed_on_another_rank(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised, SingleRank()._waiting("tokens are exchanged"):
        raise error
    assert raised.value is error


def test_a_rank_that_went_away_is_reported_with_what_was_exchanged() -> None:
    error = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    with (
        pytest.raises(PeerLostError, match=r"while tokens are exchanged \(Connection closed"),
        SingleRank()._waiting("tokens are exchanged"),
    ):
        raise error
