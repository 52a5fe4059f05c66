"""Cache measured throughput of this machine until it reboots.

CPU measurements are stored in the cache folder by processor, thread count and the variables that
affect them. A measurement taken while other processes used the cores counts little and is repeated
by the next plan, a few times. `everyframe.hardware.throughput` measures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.hardware.cpu import processor_flags
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory, empty_cache
from everyframe.hardware.throughput import measured_rates

#: Measurements stored per device, the newest ones.
_MAX_TRIALS = 500

#: Prefixes of variables that affect CPU threads, kernels and how memory is handed out.
_STEER = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "ATEN_", "MALLOC_", "GLIBC_TUNABLES",
    "LD_PRELOAD",
)  # fmt: skip

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def rates_here(
    products: Sequence[OpShape], device: DeviceFacts, num_threads: int
) -> Throughput | None:
    """Rates of these products on a device of this machine, measured unless cached.

    None for a card that has too little free memory to measure on.
    """
    measure = partial(measured_rates, products, device.torch_name, num_threads, _by_kernel)
    if device.kind != "cpu":
        found = catch_out_of_memory(measure)
        if isinstance(found, OutOfMemory):
            empty_cache()  # of what the failed trial held
            return None
        return found
    file = CacheFile("rates", _key(device, num_threads))
    saved = _trials(file.read())
    before = dict(saved)
    rates = measure(saved)
    if saved != before:
        # Another process may have saved others meanwhile.
        whole = {**_trials(file.read()), **saved}
        file.write(dict(list(whole.items())[-_MAX_TRIALS:]))
    return rates


def _key(device: DeviceFacts, num_threads: int) -> str:
    steer = sorted(item for item in os.environ.items() if item[0].startswith(_STEER))
    return json.dumps([_boot(), device.name, sorted(processor_flags()), num_threads, steer])


def _boot() -> str:
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return f"{psutil.boot_time():.0f}"


def _trials(data: Any) -> dict[str, list[float]]:
    """The valid measurements in the data read."""
    return {
        name: [float(each) for each in numbers]
        for name, numbers in (data.items() if isinstance(data, dict) else ())
        if isinstance(numbers, list)
        and len(numbers) == (3 if name == "memory" else 2)
        and all(map(_is_rate, numbers))
    }


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _by_kernel(name: str) -> AbstractContextManager[None]:
    # Late import: brings torch, and all may have been tried before.
    from everyframe.ops.attention import by_kernel

    return by_kernel(name)
