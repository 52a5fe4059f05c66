"""A Ray cluster of processes on this machine, for tests; always shut down, always with a token."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import everyframe

#: CPUs are numbers by hand: a rank takes one, however many this machine has.
_NODE = {"object_store_memory": 80_000_000}
#: One for all clusters of this process: Ray reads it once.
_TOKEN = secrets.token_hex(32)


@contextmanager
def token(monkeypatch: Any) -> Iterator[None]:
    """Context: this process and those it starts know one token, and find this very package."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", _TOKEN)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(everyframe.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Ray's own sockets are in a folder whose path may have 107 characters.
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    yield


@contextmanager
def cluster(num_cpus: int) -> Iterator[Any]:
    """Context: a cluster with a head of that many CPUs; `add` and `kill` change its nodes."""
    from ray.cluster_utils import Cluster

    head = {**_NODE, "num_cpus": num_cpus, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield found
    finally:
        found.shutdown()


@contextmanager
def node(found: Any, num_cpus: int) -> Iterator[Any]:
    """Context: one more node."""
    with nodes(found) as added:
        added.append(add(found, num_cpus))
        yield added[0]


@contextmanager
def nodes(found: Any) -> Iterator[list[Any]]:
    """Context: nodes in the list are removed at the end, unless they were killed."""
    added: list[Any] = []
    try:
        yield added
    finally:
        for each in added:
            if each in found.worker_nodes:
                kill(found, each)
        _wait_until_seen(found)


def add(found: Any, num_cpus: int) -> Any:
    """Add a node with that many CPUs."""
    return found.add_node(num_cpus=num_cpus, **_NODE)


def kill(found: Any, node: Any) -> None:
    """Kill a node with all of its processes at once, as a power cut would."""
    found.remove_node(node, allow_graceful=False)


def _wait_until_seen(found: Any) -> None:
    """Wait until Ray counts the nodes that are left: it learns of a death by and by."""
    import ray

    until = time.monotonic() + 30
    while ray.is_initialized():
        if sum(each["Alive"] for each in ray.nodes()) <= len(found.list_all_nodes()):
            return
        assert time.monotonic() < until, "Ray still counts a node that was killed"
        time.sleep(0.1)


def actor_processes() -> list[int]:
    """Process ids of the ranks' actors on this machine that this process's children started."""
    import psutil

    below = psutil.Process(os.getpid()).children(recursive=True)
    return [each.pid for each in below if "RayRank" in " ".join(each.cmdline())]
