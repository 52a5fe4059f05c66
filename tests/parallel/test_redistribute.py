"""Columns become rows and columns again, bit for bit, among any number of ranks.

What each rank should hold follows from plain indexing of the whole tensor; bytes are counted by the
tests themselves, where torch.distributed is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everyframe.parallel.communicator import Communicator, FakeCommunicator, broadcastable
from everyframe.parallel.redistribute import Redistribute
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from helpers.rank_pool import Group, in_every_size, ranks

__all__ = ["ranks"]

GRIDS = [
    TokenGrid(1, 16, 12),
    TokenGrid(2, 15, 12),
    TokenGrid(2, 3, 7),
    TokenGrid(3, 2, 5),
    TokenGrid(2, 1, 4),  # a picture: fewer rows than ranks
    TokenGrid(1, 2, 1),  # one token a frame
]


def whole(grid: TokenGrid, channels: int = 3) -> Tensor:
    numbers = torch.arange(grid.num_tokens * channels, dtype=torch.float64)
    return numbers.view(grid.samples, grid.frames, grid.places, channels)


def moved(group: Communicator, grid: TokenGrid, groups: int, dtype: torch.dtype) -> dict[str, Any]:
    """One rank's way to rows, back and to the whole, and bytes that it sent."""
    import torch.distributed as dist

    x = whole(grid).to(dtype)
    switch = Redistribute(TokenPartition(grid, group.weights, groups), group)
    mine = switch.take(x[switch.samples])
    sent, before = 0, dist.all_to_all_single

    def counting(out: Tensor, given: Tensor, receive: Any, send: list[int], **named: Any) -> None:
        nonlocal sent
        sent += sum(send) - send[group.rank]
        before(out, given, receive, send, **named)

    dist.all_to_all_single = counting
    try:
        rows = switch.to_rows(mine)
        back = switch.to_columns(rows)
    finally:
        dist.all_to_all_single = before
    return {
        "columns": mine,
        "rows": rows,
        "back": back,
        "whole": switch.gather(mine),
        "sent": sent,
        "counted": sum(number for what, number in group.sent.items() if "frames" in what),
        "all sent": group.sent.total(),
    }


@in_every_size
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_moved_is_what_indexing_gives(
    ranks: Group, size: int, grid: TokenGrid, groups: int
) -> None:
    groups = min(groups, size, grid.samples)
    partition, x = TokenPartition(grid, (1.0,) * size, groups), whole(grid)
    rows = x.flatten(0, 1)
    columns = x.transpose(1, 2).flatten(0, 1)  # (B S, T, C)
    num_columns = num_rows = 0
    for rank, found in enumerate(ranks.run(size, moved, grid, groups, torch.float64)):
        mine = partition.rows[rank]
        assert torch.equal(found["rows"][0], rows[mine.start : mine.stop])
        held = found["columns"].transpose(1, 2).flatten(0, 1)
        assert torch.equal(
            held, columns[partition.columns[rank].start : partition.columns[rank].stop]
        )
        assert torch.equal(found["back"], found["columns"])
        assert torch.equal(found["whole"], x)
        num_columns += len(held)
        num_rows += len(found["rows"][0])
        assert found["sent"] == partition.num_sent(rank) * 3 * 8
    assert num_columns == grid.samples * grid.places  # none twice, none padded
    assert num_rows == grid.samples * grid.frames


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 0.0, 2.0), (5.0, 1.0, 1.0, 1.0, 1.0)])
def test_shares_of_any_weight(ranks: Group, weights: tuple[float, ...]) -> None:
    grid = TokenGrid(2, 5, 9)
    found = ranks.run(len(weights), moved, grid, 1, torch.float64, weights=weights)
    for rank, each in enumerate(found):
        ideal = Fraction(18) * Fraction(weights[rank]) / sum(map(Fraction, weights))
        assert abs(each["columns"].shape[2] - ideal) < 1
        assert torch.equal(each["back"], each["columns"])
        assert torch.equal(each["whole"], whole(grid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_any_dtype_arrives_bit_for_bit(ranks: Group, dtype: torch.dtype) -> None:
    grid = TokenGrid(2, 4, 7)
    for each in ranks.run(3, moved, grid, 1, dtype):
        assert each["whole"].dtype == each["rows"].dtype == dtype
        assert torch.equal(each["back"], each["columns"])
        assert torch.equal(each["whole"], whole(grid).to(dtype))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_are_those_of_the_formula(ranks: Group, size: int) -> None:
    """2 units: one to rows, one back. Sizes that divide, so that the formula is whole."""
    grid = TokenGrid(1, 30, 30)
    unit = Fraction(grid.num_tokens * 3 * 8 * (size - 1), size**2)
    for found in ranks.run(size, moved, grid, 1, torch.float64):
        assert found["sent"] == 2 * unit
        assert found["counted"] == found["sent"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_two_samples_never_send_more(ranks: Group, size: int) -> None:
    """Each rank in as few samples as can be: nothing at all where there is a rank a sample."""
    grid = TokenGrid(2, 30, 30)
    unit = Fraction(grid.num_tokens * 3 * 8 * (size - 1), size**2)
    sent = [found["sent"] for found in ranks.run(size, moved, grid, 1, torch.float64)]
    assert max(sent) <= 2 * unit
    assert sum(sent) < 2 * unit * size
    assert size != 2 or sent == [0, 0]


def test_an_imagined_rank_has_the_shapes_and_bytes_of_a_real_one(ranks: Group) -> None:
    grid = TokenGrid(2, 5, 7)
    for rank, real in enumerate(ranks.run(3, moved, grid, 1, torch.float64)):
        imagined = FakeCommunicator(rank, (1.0,) * 3)
        found = moved(imagined, grid, 1, torch.float64)
        for name in ("columns", "rows", "back", "whole"):
            assert found[name].shape == real[name].shape
        assert found["all sent"] == real["all sent"] > 0


class Counted(TorchDispatchMode):
    """How many operations there are."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_no_operation_is_for_each_pair_of_ranks() -> None:
    """Those of 200 ranks took most of the time of a plan."""
    grid, size = TokenGrid(2, 30, 30), 60
    with Counted() as counted:
        Redistribute(TokenPartition(grid, (1.0,) * size, 2), FakeCommunicator(7, (1.0,) * size))
    assert 0 < counted.number < size


@broadcastable
@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None


def statistics(group: Communicator) -> dict[str, Any]:
    x = torch.tensor([0.1, 0.7]) * (group.rank + 1)
    layout = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    mine = [x, x.to(torch.bfloat16), {"of": Pair(layout, None)}, (3, "ü")]
    received = group.broadcast_tree(mine if group.rank == 1 else None, 1, "sharing")
    return {
        "gathered": group.gather(x[None], [1] * group.size, "gathering"),
        "received": group.all_gather_object({"rank": group.rank, "ä": [1.5, None]}, "telling"),
        "shared": received,
        "sent": dict(group.sent),
    }


def test_tensors_and_values_arrive_everywhere(ranks: Group) -> None:
    found = ranks.run(3, statistics)
    x = torch.tensor([0.1, 0.7])
    for each in found:
        assert torch.equal(each["gathered"], torch.stack([x, x * 2, x * 3]))
        assert each["received"] == [{"rank": r, "ä": [1.5, None]} for r in range(3)]
        assert torch.equal(each["shared"][0], x * 2)
        assert torch.equal(each["shared"][1], (x * 2).to(torch.bfloat16))
        pair = each["shared"][2]["of"]
        assert isinstance(pair, Pair)
        assert pair.second is None
        assert torch.equal(pair.first, torch.arange(24.0).view(1, 2, 3, 4))
        assert pair.first.is_contiguous(memory_format=torch.channels_last)
        assert each["shared"][3] == (3, "ü")
        assert each["sent"]["gathering"] == 2 * 4 * 2  # two floats to two others
