"""Groups of ranks that exchange what each of them has: everybody gets every part, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everyframe.diffusers_pipelines.parallel.cfg_parallel import CfgExchange
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.communicator import Communicator, FakeCommunicator
from helpers.rank_pool import Group, in_every_size, ranks

__all__ = ["ranks"]

LENGTHS = (13, 7)


def parts(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.arange(n, dtype=torch.float32) + 100 * g for g, n in enumerate(lengths)]


def exchanged(
    video_group: Communicator, lengths: tuple[int, ...], others: bool = False
) -> dict[str, Any]:
    """What one rank gets, and the bytes that left it; with `others` it hands on another's part."""
    groups = CfgGroups.of(video_group.weights, 2, 2)
    exchange = CfgExchange(video_group, groups)
    mine = parts(lengths)[exchange.mine]
    if others and video_group.rank == video_group.size - 1:
        mine = mine + 1
    return {"got": exchange.exchange(mine, lengths, "parts"), "sent": video_group.sent["parts"]}


@pytest.mark.parametrize(
    ("weights", "branches", "groups", "ranks", "loads"),
    [
        ((1, 1), 2, 2, [[0], [1]], (1, 1)),
        ((1, 1, 1), 2, 2, [[0], [1, 2]], (1, 1)),
        ((1, 1, 2), 2, 2, [[0, 1], [2]], (1, 1)),
        ((1, 1, 1), 3, 2, [[0, 1], [2]], (2, 1)),
        ((1,) * 7, 2, 2, [[0, 1, 2], [3, 4, 5, 6]], (1, 1)),
        ((1,), 2, 2, [[0]], (2,)),
        ((1, 1, 1), 1, 2, [[0, 1, 2]], (1,)),
    ],
)
def test_which_ranks_have_which_branches(
    weights: tuple[float, ...], branches: int, groups: int, ranks: Any, loads: Any
) -> None:
    found = CfgGroups.of(weights, branches, groups)
    assert [list(group) for group in found.ranks] == ranks
    assert found.loads == loads
    every = [each for number in range(len(ranks)) for each in found.branches(number)]
    assert every == list(range(branches))
    assert [len(group) for group in found.firsts.ranks] == [1] * len(ranks)


@in_every_size
def test_every_rank_has_every_part(ranks: Group, size: int) -> None:
    if size == 1:
        return
    for lengths in (LENGTHS, (0, 5), (4, 0)):
        found = ranks.run(size, exchanged, lengths)
        for rank, each in enumerate(found):
            assert all(map(torch.equal, each["got"], parts(lengths)))
            assert each["sent"] == exchanged(FakeCommunicator(rank, (1.0,) * size), lengths)["sent"]
        groups = CfgGroups.of((1.0,) * size, 2, 2)
        # Nobody is sent what it has: a part goes to the ranks of the other group alone.
        wanted = [n * (size - len(group)) for n, group in zip(lengths, groups.ranks, strict=True)]
        assert sum(each["sent"] for each in found) == 4 * sum(wanted)


def test_a_rank_that_hands_on_another_part_is_seen(ranks: Group) -> None:
    found = ranks.run(3, exchanged, LENGTHS, others=True)
    assert not all(map(torch.equal, found[0]["got"], parts(LENGTHS)))
