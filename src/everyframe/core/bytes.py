"""Amounts of memory as people write them: ``8GB``, ``7.5 GiB``, ``500MB``, or plain bytes.

Read next: `everyframe.core.bytes`, which writes them.
"""

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
    """Bytes of an amount of memory; `name` is the option that it was given to.

    Raises:
        InputError: no amount, or nothing at all.
    """
    found = _WRITTEN.fullmatch(written)
    unit = found[2].lower() if found else None
    if found is None or unit not in _UNITS:
        raise InputError(f"{name} must be an amount such as 8GB, 7.5GiB or 500MB, got {written!r}")
    size = int(float(found[1]) * _UNITS[unit])
    if size <= 0:
        raise InputError(f"{name} must be more than nothing, got {written!r}")
    return size


#: Share of the free memory that a plan may count on: allocators keep some, forecasts err a little.
USABLE_SHARE = 0.92

#: Bytes that the process of a rank takes for itself, before it holds anything of a model: torch and
#: what else it has imported, written to and so its own. Measured with torch 2.13: 302 to 307 MB.
PROCESS_BYTES = 305 * 10**6


def without_processes(device: DeviceFacts, num_ranks: int) -> DeviceFacts:
    """A CPU with the memory that so many ranks leave free on it; one works without a further."""
    if device.kind != "cpu" or num_ranks == 1:
        return device
    return replace(device, free_memory=max(0, device.free_memory - num_ranks * PROCESS_BYTES))


def fits(num_bytes: int, device: DeviceFacts) -> bool:
    """Whether so many bytes can be had on the device now."""
    return share_of(num_bytes, device) <= 1


def share_of(num_bytes: int, device: DeviceFacts) -> float:
    """How many times what can be had on the device now that is."""
    usable = device.free_memory * USABLE_SHARE
    return num_bytes / usable if usable > 0 else math.inf if num_bytes else 0.0


def format_bytes(num_bytes: int) -> str:
    """``"18.4 GB"``, ``"52 MB"``: decimal units, as disks and cards are sold."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB"
