"""How fast this machine is, as far as it was tried since it was started.

Trials of a CPU are saved in the cache folder for the boot: by processor, number of threads and what
steers them. A trial while others had the cores counts for little and is made again by the next
plan, a few times. Read next: `everyframe.hardware.throughput`, which tries.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.hardware.cpu import processor_flags
from everyframe.hardware.throughput import measured_rates

#: So many trials are saved of one device, the newest.
_MAX_TRIALS = 500

#: Beginnings of variables that steer a CPU's threads and kernels.
_STEER = ("OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "ATEN_")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def rates_here(products: Sequence[OpShape], device: DeviceFacts, num_threads: int) -> Throughput:
    """Rates of these products on a device of this machine, tried unless that was done before."""
    if device.kind != "cpu":
        return measured_rates(products, device.torch_name, num_threads, _by_kernel)
    file = CacheFile("rates", _key(device, num_threads))
    saved = _trials(file.read())
    before = dict(saved)
    rates = measured_rates(products, device.torch_name, num_threads, _by_kernel, saved)
    if saved != before:
        # Another process may have saved others meanwhile.
        whole = {**_trials(file.read()), **saved}
        file.write(dict(list(whole.items())[-_MAX_TRIALS:]))
    return rates


def _key(device: DeviceFacts, num_threads: int) -> str:
    steer = sorted(item for item in os.environ.items() if item[0].startswith(_STEER))
    return json.dumps([_boot(), device.name, sorted(processor_flags()), num_threads, steer])


def _boot() -> str:
    """What stands for the time since the machine was started."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return f"{psutil.boot_time():.0f}"


def _trials(data: Any) -> dict[str, list[float]]:
    """The trials that were read, without anything that is none."""
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
    # Not on top: it brings torch, and all may have been tried before.
    from everyframe.ops.attention import by_kernel

    return by_kernel(name)
