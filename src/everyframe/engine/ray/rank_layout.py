"""Where the ranks of a run are: their nodes, devices and the environment of each. Plain data.

Ranks of one node follow each other, and each of them sees all devices of the run on its node, so
that they can reach each other's memory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everyframe.core.errors import InputError
from everyframe.engine.workers.torchrun import TorchrunRank
from everyframe.engine.workers.worker_process import WorkerJob

#: Names under which the drivers of NVIDIA and AMD look for their devices.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class RankPlace:
    """Where one rank was placed.

    Attributes:
        node: id of its node.
        address: address of the node.
        host: name of the node, for messages.
        port: a free port of the node.
        devices: ids of the devices that it holds there; none for a CPU.
        interface: network interface of `address`; empty if unknown.
    """

    node: str
    address: str
    host: str
    port: int
    devices: tuple[str, ...] = ()
    interface: str = ""


@dataclass(frozen=True)
class RankJob:
    """What one rank is to do.

    Attributes:
        job: its job; the paths in it are written by the rank.
        name: name of the run.
        environment: environment variables of its worker process.
        log_level: level of the log records that it sends.
    """

    job: WorkerJob
    name: str
    environment: Mapping[str, str]
    log_level: str = "WARNING"


@dataclass(frozen=True)
class Rank:
    """One rank of a run: the index of its place, and its numbers and environment."""

    place: int
    numbers: TorchrunRank
    environment: Mapping[str, str]

    def job_of(self, job: WorkerJob) -> WorkerJob:
        """The job for this rank."""
        return replace(job.of_ranks(self.numbers.size, self.numbers), rank=self.numbers.rank)


def lay_out(places: Sequence[RankPlace]) -> list[Rank]:
    """Number the places: those of one node follow each other, the first node's come first."""
    nodes = list(dict.fromkeys(place.node for place in places))
    order = sorted(range(len(places)), key=lambda at: nodes.index(places[at].node))
    first = places[order[0]]
    address = "127.0.0.1" if len(nodes) == 1 else first.address
    ranks = []
    for rank, at in enumerate(order):
        mine = places[at]
        on_node = [each for each in order if places[each].node == mine.node]
        numbers = TorchrunRank(rank, len(places), on_node.index(at), len(on_node))
        environment = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(first.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(numbers.local_rank),
            "LOCAL_WORLD_SIZE": str(len(on_node)),
        }
        devices = [name for each in on_node for name in places[each].devices]
        if devices:
            environment |= dict.fromkeys(_VISIBLE, ",".join(devices))
        if len(nodes) > 1 and mine.interface:
            environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
                                         mine.interface)  # fmt: skip
        ranks.append(Rank(at, numbers, environment))
    return ranks


def check_software(here: Mapping[str, str], there: Mapping[str, str], place: RankPlace) -> None:
    """Raise `InputError` if a node has other versions than this machine; names both."""
    other = [name for name in here if here[name] != there.get(name)]
    if other:
        named = "; ".join(f"{n} is {there.get(n)} there and {here[n]} here" for n in other)
        raise InputError(
            f"the node {place.host} ({place.address}) has other software than this machine: "
            f"{named}; every node needs the same"
        )
