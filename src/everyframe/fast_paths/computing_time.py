"""Seconds that runs computed since the kernels of their plan were last tried, by certificate key.

One JSON file beside the certificates. Several processes may write at once; an addition that is lost
only puts trials off. A file that can't be read counts as empty.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from everyframe.checkpoints.folder import warn_unusable_cache
from everyframe.core.paths import replace_file
from everyframe.fast_paths import certificates

_log = logging.getLogger(__name__)
_SCHEMA = "everyframe.computing_time/1"

#: Plans in the file; the least recently computed ones go.
MAX_PLANS = 64

#: A larger file is not read. Keys have 41 characters.
_MAX_BYTES = 128 * MAX_PLANS


def computing_time(device: str, plan: str) -> float:
    """Seconds computed for that device and plan key since the last trial; 0 if unknown."""
    return _read().get(_name(device, plan), 0.0)


def add_computing_time(device: str, plan: str, seconds: float) -> None:
    """Add the seconds of a run."""
    times, name = _read(), _name(device, plan)
    seconds += times.pop(name, 0.0)
    _write({**times, name: seconds})


def reset_computing_time(device: str, plan: str) -> None:
    """Begin at zero, as trials begin."""
    times = _read()
    if times.pop(_name(device, plan), None) is not None:
        _write(times)


def _name(device: str, plan: str) -> str:
    return f"{device}/{plan}"


def _file() -> Path:
    return certificates.folder() / "computing_time.json"


def _read() -> dict[str, float]:
    file = _file()
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        times = _times(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        warn_unusable_cache(error)
        return {}
    except (ValueError, RecursionError) as error:
        _log.warning("%s can't be read (%s); times are counted from zero", file, error)
        return {}
    return times


def _times(data: Any) -> dict[str, float]:
    """The times in the data read; `ValueError` if it is anything else."""
    times = data.get("seconds") if isinstance(data, dict) else None
    if not isinstance(times, dict) or data.get("schema") != _SCHEMA:
        raise ValueError("it holds something else")
    if not all(type(each) in (int, float) and 0 <= each < math.inf for each in times.values()):
        raise ValueError("a time is no number of seconds")
    return {name: float(each) for name, each in times.items()}


def _write(times: dict[str, float]) -> None:
    newest = {name: round(each, 3) for name, each in [*times.items()][-MAX_PLANS:]}
    try:
        replace_file(_file(), json.dumps({"schema": _SCHEMA, "seconds": newest}, indent=0))
    except OSError as error:
        warn_unusable_cache(error)
