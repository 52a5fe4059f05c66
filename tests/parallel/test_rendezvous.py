"""How ranks meet in groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.rendezvous import destroy, join_ranks, new_group
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


@pytest.mark.parametrize("name", ["runs#2", "runs?", "runs %41"])
def test_ranks_meet_in_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a URL the place would be another: here a folder, elsewhere the file of another run."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")  # set anew, and as before afterwards
    (tmp_path / "runs").mkdir()
    (tmp_path / name).mkdir()
    try:
        assert join_ranks(0, [1.0], tmp_path / name / "meeting").size == 1
        assert [*(tmp_path / name).iterdir()] == [tmp_path / name / "meeting"]
    finally:
        destroy()
