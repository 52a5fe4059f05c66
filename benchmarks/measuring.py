"""Clocks, the matrix-product peak and distances for benchmarks, on a CPU and on a card.

A card computes on after the call that asked for it: every clock here is read when it has
finished. Not here: what is compared, and how often.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from result_pages import versions_of
from torch import Tensor

from everyframe.core.facts import DeviceFacts, MachineFacts

#: Sides of the square products that the peak is the best of.
SQUARES = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192)}

#: Operations after which a peak is tried no more, per size.
_ENOUGH = {"cpu": 2.75e11, "cuda": 2e13}


def finish(device: str) -> None:
    """Wait until that device has computed all that it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def clock(device: str) -> float:
    """Wall time, the device's work done; on a CPU with one thread that thread's processor time."""
    finish(device)
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """How long it takes on that clock."""
    start = clock(device)
    run()
    return clock(device) - start


def peak(dtype: str, device: str = "cpu") -> float:
    """FLOP a second of the best square product, each size tried for about the same time."""
    best, kind = 0.0, torch.device(device).type
    for side in SQUARES[kind]:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        run = partial(torch.mm, a, b)
        run()
        repeats = max(2, min(32, int(_ENOUGH[kind] / (2 * side**3))))
        took = statistics.median(seconds(run, device) for _ in range(repeats))
        best = max(best, 2 * side**3 / took)
    return best


def relative(got: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((got.double() - true.double()).norm() / true.double().norm())


def hardware(facts: MachineFacts, device: DeviceFacts) -> str:
    """What a page says of where it was measured."""
    if device.kind != "cpu":
        return (
            f"Hardware: {device.name}, wall time with the card's work done; {facts.cpu.name}, "
            f"{facts.num_cores} cores.\nVersions: {versions_of(facts)}."
        )
    return (
        f"Hardware: {facts.cpu.name}, {torch.get_num_threads()} of {facts.num_cores} cores,\n"
        f"{'processor' if torch.get_num_threads() == 1 else 'wall'} time; load at the end\n"
        f"{os.getloadavg()[0]:.1f}. Versions: {versions_of(facts)}."
    )
