"""How ranks meet: processes find each other, agree that they are to do the same, and part.

On one machine they meet by a file and talk over the loopback address, so that nothing can be
reached from outside; under torchrun by what it has put into the environment. CPUs talk over gloo,
CUDA devices over NCCL (and over gloo of what lies on the host). Not here: how processes are started
and what happens when one dies (`everyframe.engine`). Read next: `team`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everyframe.core.errors import InputError
from everyframe.parallel.communicator import Communicator, SingleRank, TorchCommunicator

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def join_ranks(
    rank: int,
    weights: Sequence[float],
    place: Path | None,
    *,
    kind: str = "cpu",
    is_local: bool = True,
    patience: float = 1800.0,
) -> Communicator:
    """Join the others as `rank`; a team of all. `weights` are the speeds of all ranks.

    Args:
        rank: from 0; its device must have been chosen (``torch.cuda.set_device``).
        weights: of every rank, so their number too.
        place: a file that is not there yet, on this machine; None under torchrun.
        kind: torch's device type.
        is_local: whether all ranks are on this machine; then they talk over loopback alone.
        patience: seconds that an exchange waits for the others.
    """
    if kind not in _BACKENDS:
        raise InputError(f"several devices can be {' or '.join(_BACKENDS)}, not {kind}")
    if is_local:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        _BACKENDS[kind],
        init_method="env://" if place is None else f"file://{place}",
        rank=rank,
        world_size=len(weights),
        timeout=timedelta(seconds=patience),
    )
    return TorchCommunicator(weights)


def split(team: Communicator, groups: Sequence[Sequence[int]]) -> Communicator:
    """This rank's own team when all ranks of `team` go apart into `groups`.

    Every rank must be in one group, and all must call this with the same groups.
    """
    assert sorted(rank for group in groups for rank in group) == list(range(team.size))
    return team if len(groups) == 1 else new_group(team, groups)


def new_group(
    team: Communicator, groups: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> Communicator:
    """As `split`, and always another team: what it exchanges goes beside what the first does.

    Its ranks have their `weights` among those of all, where these are others than the team's. All
    processes of the world are in `team`: each of them has to take part.
    """
    if any(len(group) > 1 for group in groups):
        assert team.size == dist.get_world_size(), "processes that are in no group would be missed"
    weights = team.weights if weights is None else weights
    # All ranks make all of them; who is alone has nobody to talk to.
    made = [dist.new_group(list(group)) if len(group) > 1 else None for group in groups]
    mine = next(list(group) for group in groups if team.rank in group)
    own = next(each for each, group in zip(made, groups, strict=True) if team.rank in group)
    if own is None:
        return SingleRank()
    parted = TorchCommunicator([weights[rank] for rank in mine], own)
    parted.waits = team.waits
    return parted


def check_equal_on_ranks(team: Communicator, facts: Mapping[str, Any], what: str) -> None:
    """Raise `InputError` if a rank holds other `facts` than the first one; names both.

    Facts are plain data. What isn't the same at the start would be a hang or a wrong video later.
    """
    for rank, other in enumerate(team.tell_all(dict(facts), "ranks compare their plans")):
        for name in {**facts, **other}:
            if facts.get(name) != other.get(name):
                raise InputError(
                    f"ranks {team.rank} and {rank} do not have the same {what}: {name} is "
                    f"{facts.get(name)!r} and {other.get(name)!r}; every rank needs the same"
                )


def destroy() -> None:
    """Part from the others; ports are closed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_device(device: str) -> None:
    """Make a CUDA device the one that NCCL and new tensors use."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
