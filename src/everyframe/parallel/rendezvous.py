"""Rendezvous: join processes into torch.distributed groups, compare their plans, and leave.

On one machine ranks meet through a file and use the loopback address only, so nothing is reachable
from outside. Under torchrun they use its environment variables. CPUs use gloo; CUDA devices use
NCCL, and gloo for host tensors. Process start and crash handling are in `everyframe.engine`.
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
    """Join the other processes as `rank`; returns the communicator of all ranks.

    Args:
        rank: from 0; its device must be selected already (``torch.cuda.set_device``).
        weights: speed of every rank, so also the number of ranks.
        place: a file that does not exist yet, on this machine; None under torchrun.
        kind: torch's device type.
        is_local: whether all ranks are on this machine; they then use loopback only.
        patience: timeout of an exchange in seconds.

    Raises:
        InputError: devices of this kind can't work together.
    """
    if kind not in _BACKENDS:
        raise InputError(f"several devices can be {' or '.join(_BACKENDS)}, not {kind}")
    if is_local:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    timeout = timedelta(seconds=patience)
    store = None
    if place is not None:
        # Not by a file:// URL, which ends at a "#" or "?" in the name of a folder.
        store = dist.FileStore(str(place), len(weights))  # type: ignore[attr-defined]
        store.set_timeout(timeout)
    dist.init_process_group(
        _BACKENDS[kind],
        init_method="env://" if store is None else None,
        store=store,
        rank=rank,
        world_size=len(weights),
        timeout=timeout,
    )
    return TorchCommunicator(weights)


def split(world: Communicator, groups: Sequence[Sequence[int]]) -> Communicator:
    """Split `world` into `groups` and return this rank's group.

    Every rank must be in exactly one group, and all must call this with the same groups.
    """
    assert sorted(rank for group in groups for rank in group) == list(range(world.size))
    return world if len(groups) == 1 else new_group(world, groups)


def new_group(
    world: Communicator, groups: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> Communicator:
    """Like `split`, but always a new group, whose exchanges do not queue behind the world's.

    `weights` are speeds of all ranks, by default the world's. `world` must contain all processes of
    the world: each of them has to take part.
    """
    if any(len(group) > 1 for group in groups):
        assert world.size == dist.get_world_size(), "processes that are in no group would be missed"
    weights = world.weights if weights is None else weights
    # All ranks create all groups; a rank alone needs none.
    world.waits("ranks meet in groups")
    made = [dist.new_group(list(group)) if len(group) > 1 else None for group in groups]
    world.waits("")
    mine = next(list(group) for group in groups if world.rank in group)
    own = next(each for each, group in zip(made, groups, strict=True) if world.rank in group)
    if own is None:
        return SingleRank()
    parted = TorchCommunicator([weights[rank] for rank in mine], own)
    parted.waits = world.waits
    return parted


def check_equal_on_ranks(world: Communicator, facts: Mapping[str, Any], what: str) -> None:
    """Raise `InputError` if a rank's `facts` differ from those of the first; names both values.

    Facts are plain data. A difference at the start would become a hang or a wrong video later.
    """
    for rank, other in enumerate(world.all_gather_object(dict(facts), "ranks compare their plans")):
        for name in {**facts, **other}:
            if facts.get(name) != other.get(name):
                raise InputError(
                    f"ranks {world.rank} and {rank} do not have the same {what}: {name} is "
                    f"{facts.get(name)!r} and {other.get(name)!r}; every rank needs the same"
                )


def destroy() -> None:
    """Leave the group and close its ports."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_device(device: str) -> None:
    """Select the CUDA device for NCCL and new tensors; does nothing for other devices."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
