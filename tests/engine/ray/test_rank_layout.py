"""Ranks of several nodes: their numbers, devices and environment, and nodes of other software."""

from __future__ import annotations

import pytest

from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.engine.ray.rank_layout import RankPlace, check_software, lay_out
from everyframe.engine.workers.worker_process import WorkerJob


def place(node: str, *devices: str) -> RankPlace:
    return RankPlace(node, f"10.0.0.{node}", f"host{node}", 5000 + int(node), devices, f"eth{node}")


def test_ranks_of_a_node_follow_each_other_and_see_all_its_devices() -> None:
    ranks = lay_out([place("1", "3"), place("2", "0"), place("1", "1")])
    assert [rank.place for rank in ranks] == [0, 2, 1]
    numbers = [(r.numbers.rank, r.numbers.local_rank, r.numbers.local_size) for r in ranks]
    assert numbers == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        assert [rank.environment[name] for rank in ranks] == ["3,1", "3,1", "0"]
    for rank in ranks:
        assert rank.environment["MASTER_ADDR"] == "10.0.0.1"
        assert rank.environment["MASTER_PORT"] == "5001"
        assert rank.environment["WORLD_SIZE"] == "3"
    assert [rank.environment["GLOO_SOCKET_IFNAME"] for rank in ranks] == ["eth1", "eth1", "eth2"]
    job = ranks[2].job_of(WorkerJob(Request(prompt="a")))
    assert (job.rank, job.local, len(job.weights)) == (2, (0, 1), 3)


def test_ranks_of_one_node_talk_over_loopback_alone() -> None:
    for rank in lay_out([place("7"), place("7")]):
        assert rank.environment["MASTER_ADDR"] == "127.0.0.1"
        assert "GLOO_SOCKET_IFNAME" not in rank.environment
        # A CPU hides no devices.
        assert "CUDA_VISIBLE_DEVICES" not in rank.environment


def test_other_versions_are_refused_with_both_named() -> None:
    here = {"everyframe": "1", "torch": "2.13", "ray": "2.60"}
    check_software(here, dict(here), place("1"))
    with pytest.raises(InputError, match=r"host2 \(10.0.0.2\).*torch is 2.12 there and 2.13 here"):
        check_software(here, {**here, "torch": "2.12"}, place("2"))
    with pytest.raises(InputError, match="ray is None there"):
        check_software(here, {"everyframe": "1", "torch": "2.13"}, place("2"))
