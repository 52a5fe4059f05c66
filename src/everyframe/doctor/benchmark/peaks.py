"""Peaks of a device: matrix products by dtype, and copies. Runs in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everyframe.hardware.throughput import wait_for_device

#: Sides of the square products, in order, by kind of device.
_SIDES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_FEW_SIDES = (256, 512, 1024, 2048, 4096)

#: A larger product is left out if it would take longer, in seconds.
_LONGEST = 1.0
_ROUNDS = 5

#: Bytes that are copied.
_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}


def measure_peaks(device: str, dtypes: tuple[str, ...], num_threads: int) -> list[dict[str, Any]]:
    """Best rates as plain data, see `result.PeakResult`.

    Args:
        device: torch's device name.
        dtypes: torch's names of the dtypes of the products.
        num_threads: CPU threads.
    """
    import torch

    from everyframe.hardware.cpu import cpu_threads

    kind = torch.device(device).type
    found: list[dict[str, Any]] = []
    with cpu_threads(num_threads), torch.inference_mode():
        for dtype in dtypes:
            rate, side = _product(device, dtype, _SIDES.get(kind, _FEW_SIDES))
            found.append({"name": dtype, "kind": "product", "rate": rate, "size": side})
        size = _COPIED.get(kind, 256 << 20)
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        seconds = _best(lambda: target.copy_(source), device)
        found.append({"name": "copy", "kind": "copy", "rate": 2 * size / seconds, "size": size})
        if kind != "cpu":
            host = torch.ones(_COPIED["cpu"] // 4).pin_memory() if kind == "cuda" else None
            host = torch.ones(_COPIED["cpu"] // 4) if host is None else host
            part = target[: host.numel()]
            seconds = _best(lambda: part.copy_(host), device)
            found.append({"name": "host to device", "kind": "copy",
                          "rate": host.nbytes / seconds, "size": host.nbytes})  # fmt: skip
    return found


def _product(device: str, dtype: str, sides: tuple[int, ...]) -> tuple[float, int]:
    """Operations a second of the best square product, and its side."""
    import torch

    best, best_side = 0.0, sides[0]
    for side in sides:
        # Eight times the operations of the one before, at the best rate so far.
        if best and 2 * side**3 / best > _LONGEST:
            break
        a = torch.ones(side, side, device=device, dtype=getattr(torch, dtype))
        b = torch.ones_like(a)
        rate = 2 * side**3 / _best(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        if rate > best:
            best, best_side = rate, side
    return best, best_side


def _best(run: Callable[[], object], device: str) -> float:
    """Seconds of the fastest round, which other load of the machine disturbed least."""
    run()
    taken = []
    for _ in range(_ROUNDS):
        wait_for_device(device)
        began = time.perf_counter()
        run()
        wait_for_device(device)
        taken.append(time.perf_counter() - began)
        if sum(taken) > 2 * _LONGEST:
            break
    return max(min(taken), 1e-7)
