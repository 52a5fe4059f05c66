"""Seconds that runs computed since the kernels of their plan were last tried, by certificate key.

Each plan has a cache file. Several processes may write it at once; an addition that is lost only
puts trials off.
"""

from __future__ import annotations

import math

from everyframe.checkpoints.cache_file import CacheFile


def computing_time(device: str, plan: str) -> float:
    """Seconds computed for that device and plan key since the last trial; 0 if unknown."""
    seconds = _file(device, plan).read()
    is_time = type(seconds) in (int, float) and 0 <= seconds < math.inf
    return float(seconds) if is_time else 0.0


def add_computing_time(device: str, plan: str, seconds: float) -> None:
    """Add the seconds of a run."""
    _file(device, plan).write(computing_time(device, plan) + seconds)


def reset_computing_time(device: str, plan: str) -> None:
    """Begin at zero, as trials begin."""
    if computing_time(device, plan):
        _file(device, plan).write(0.0)


def _file(device: str, plan: str) -> CacheFile:
    return CacheFile("computing_times", f"{device}/{plan}")
