"""Probe of communication between devices: all-reduce, and all-to-all with uneven sizes.

Each rank is a child process of the probe, so all end with it. The probe's time limit detects hangs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everyframe.doctor.probes import outcome
from everyframe.hardware.isolation import safe_start, signal_name

#: Ranks time out after this. The probe's own limit is longer, so that they can report it.
_PATIENCE = timedelta(seconds=30)


def collectives(device: str) -> dict[str, Any]:
    """All GPUs of this kind, one rank each, over NCCL (or RCCL with ROCm)."""
    count = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    if count < 2:
        return outcome(skipped="fewer than two devices")
    return among(count, "nccl")


def among(num_ranks: int, backend: str) -> dict[str, Any]:
    """The probe with that many ranks; ``gloo`` computes on the CPU."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="everyframe-") as folder:
        place = f"{folder}/meeting"
        with safe_start():
            results = context.SimpleQueue()
            ranks = [
                context.Process(target=_rank, args=(rank, num_ranks, backend, place, results))
                for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
        for process in ranks:
            process.join()
        answers = []
        while not results.empty():
            answers.append(results.get())
    wrong = [text for text in answers if text]
    for rank, process in enumerate(ranks):
        code = process.exitcode or 0
        if code:
            how = signal_name(-code) if code < 0 else f"exit code {code}"
            wrong.append(f"rank {rank} of {num_ranks} ended with {how}")
    return outcome(wrong, ranks=num_ranks, backend=backend)


def _rank(rank: int, num_ranks: int, backend: str, place: str, results: Any) -> None:
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # By path: a URL would end at a # in the folder's name.
    store = dist.FileStore(place, num_ranks)  # type: ignore[attr-defined]
    store.set_timeout(_PATIENCE)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=_PATIENCE
    )
    results.put(_sum(device, rank, num_ranks) or _deal(device, rank, num_ranks))
    dist.destroy_process_group()


def _sum(device: torch.device, rank: int, num_ranks: int) -> str:
    """All-reduce of each rank's number; returns an empty text if correct."""
    x = torch.full((1 << 16,), float(rank + 1), device=device)
    dist.all_reduce(x)
    want = num_ranks * (num_ranks + 1) / 2
    return "" if bool((x == want).all()) else f"rank {rank}: a sum over all is wrong"


def _deal(device: torch.device, rank: int, num_ranks: int) -> str:
    """Uneven all-to-all: rank r sends each other rank r + 1 numbers that identify the sender."""
    sent = torch.full(((rank + 1) * num_ranks,), float(rank), device=device)
    sizes = [other + 1 for other in range(num_ranks)]
    got = torch.empty(sum(sizes), device=device)
    dist.all_to_all_single(got, sent, sizes, [rank + 1] * num_ranks)
    want = torch.cat([torch.full((other + 1,), float(other)) for other in range(num_ranks)])
    return "" if torch.equal(got.cpu(), want) else f"rank {rank}: uneven pieces arrive wrong"
