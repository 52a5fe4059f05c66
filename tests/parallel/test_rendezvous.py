"""How ranks meet in groups."""

from __future__ import annotations

from typing import Any

import pytest

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.rendezvous import new_group
from helpers.rank_pool import Group, group_of


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2,))


def meet(group: Communicator) -> list[str]:
    """What a rank waits for meanwhile."""
    messages = list[str]()
    group.waits = messages.append
    new_group(group, [[*range(group.size)]])
    return messages


def test_ranks_that_meet_in_groups_wait(ranks: Group) -> None:
    """So that those which wait for others for ever are seen to hang."""
    assert ranks.run(2, meet) == [["ranks meet in groups", ""]] * 2
