"""Retention of interrupted runs: age and size limits.

A run is deleted only after a month without a write, or when all runs together exceed a size limit:
then the oldest first, but none of the last day. Every deletion is reported. A new run triggers the
cleanup in `everyframe.engine.persistence`. Imports no torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everyframe.core.errors import InputError
from everyframe.runs.folder import free_runs

#: Environment variable: days after which a run is deleted; 0 means never.
DAYS = "EVERYFRAME_RUN_DAYS"
_DAYS = 30.0
_SECONDS_A_DAY = 86_400.0
#: Size limit of all runs in a folder, in bytes.
MOST_BYTES = 20 * 10**9
#: Days within which no run is deleted, whatever its size.
_FRESH_DAYS = 1.0


@dataclass(frozen=True)
class RemovedRun:
    """A deleted run, its size, and the reason."""

    run: str
    num_bytes: int
    why: str


def days_of_runs() -> float:
    """Days without a write after which a run is deleted.

    Raises:
        InputError: not a valid number.
    """
    given = os.environ.get(DAYS)
    try:
        days = _DAYS if not given else float(given)
    except ValueError:
        days = math.nan
    if not days >= 0:
        raise InputError(f"{DAYS} must be a number of days, 0 to keep runs for ever, got {given!r}")
    return days


def remove_old_runs(root: Path, now: float | None = None) -> Iterator[RemovedRun]:
    """Delete runs over the age or size limit from a folder, except those in use.

    Raises:
        InputError: from `days_of_runs`.
        OSError: a run can't be deleted.
    """
    days = days_of_runs()
    if not days:
        return
    now = time.time() if now is None else now
    found = sorted(((run.last_written(), run) for run in free_runs(root)), key=lambda one: one[0])
    left = sum(run.num_bytes() for _, run in found)
    for written, run in found:
        age = (now - written) / _SECONDS_A_DAY
        size = run.num_bytes()
        if age > days:
            why = f"nothing was written for {days:g} days"
        elif left > MOST_BYTES and age > _FRESH_DAYS:
            why = f"all runs together took more than {MOST_BYTES // 10**9} GB"
        else:
            continue
        if run.is_busy():
            continue  # it was resumed meanwhile: sizes of many runs take a while
        run.remove()
        left -= size
        yield RemovedRun(run.name, size, why)


def describe(removed: RemovedRun) -> str:
    """Message about a deleted run."""
    return (
        f"the interrupted run {removed.run} is removed ({removed.why}; it took "
        f"{removed.num_bytes / 1e6:.1f} MB); {DAYS}=0 keeps runs for ever"
    )
