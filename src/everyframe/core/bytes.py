"""Memory sizes: parsing ``8GB``, ``7.5 GiB``, ``500MB`` or plain bytes, formatting, and fit."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}

_WRITTEN = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(written: str, name: str) -> int:
    """Parse a memory size into bytes; `name` is the option that holds it.

    Raises:
        InputError: not a memory size, or not above zero.
    """
    found = _WRITTEN.fullmatch(written)
    unit = found[2].lower() if found else None
    if found is None or unit not in _UNITS:
        raise InputError(f"{name} must be an amount such as 8GB, 7.5GiB or 500MB, got {written!r}")
    size = int(float(found[1]) * _UNITS[unit])
    if size <= 0:
        raise InputError(f"{name} must be more than nothing, got {written!r}")
    return size


#: Usable share of the free memory: allocators reserve some, and forecasts are slightly off.
USABLE_SHARE = 0.92

#: Private bytes of a rank's process before it holds any part of a model: torch and the other
#: imports. Measured with torch 2.13: 302 to 307 MB.
PROCESS_BYTES = 305 * 10**6


def without_processes(device: DeviceFacts, num_ranks: int) -> DeviceFacts:
    """Free CPU memory after `num_ranks` rank processes; a single rank needs no further one."""
    if device.kind != "cpu" or num_ranks == 1:
        return device
    return replace(device, free_memory=max(0, device.free_memory - num_ranks * PROCESS_BYTES))


def describe_process_shortage(num_ranks: int, cpu: DeviceFacts) -> str:
    """Text for ranks whose processes leave no memory to compute in; empty if there is some."""
    if num_ranks == 1 or fits(num_ranks * PROCESS_BYTES, cpu):
        return ""
    most = max(1, int(cpu.free_memory * USABLE_SHARE / PROCESS_BYTES) - 1)
    return (
        f"not enough memory: {num_ranks} processes take about "
        f"{format_bytes(num_ranks * PROCESS_BYTES)} for themselves, {cpu.name} has "
        f"{format_bytes(cpu.free_memory)} free; give fewer devices, {most} at most"
    )


def fits(num_bytes: int, device: DeviceFacts) -> bool:
    """Whether `num_bytes` fit into the usable part of the device's free memory."""
    return share_of(num_bytes, device) <= 1


def share_of(num_bytes: int, device: DeviceFacts) -> float:
    """Ratio of `num_bytes` to the usable part of the device's free memory."""
    usable = device.free_memory * USABLE_SHARE
    return num_bytes / usable if usable > 0 else math.inf if num_bytes else 0.0


def format_bytes(num_bytes: int) -> str:
    """Format bytes in decimal units, as disks and cards are sold: ``"18.4 GB"``, ``"52 MB"``."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB"
