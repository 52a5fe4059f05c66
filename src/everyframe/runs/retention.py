"""How long runs stay that were broken off and that nobody goes on with, and how much they may take.

A run is there to be gone on with, so it goes only when nothing of it was written for a month, or
when all of them together take too much, the oldest first and none of the last day. What goes is
told. No torch here. Read next: `folder.py`; `everyframe.engine.persistence`, where a new run asks.
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

#: In this process's environment: days after which a run goes; 0 keeps all of them for ever.
DAYS = "EVERYFRAME_RUN_DAYS"
_DAYS = 30.0
_SECONDS_A_DAY = 86_400.0
#: Bytes that all runs of a folder may take.
MOST_BYTES = 20 * 10**9
#: Days within which none goes, whatever it takes.
_FRESH_DAYS = 1.0


@dataclass(frozen=True)
class RemovedRun:
    """A run that was removed, what it took, and why it went."""

    run: str
    num_bytes: int
    why: str


def days_of_runs() -> float:
    """After how many days without a write a run goes. Raises `InputError` for no such number."""
    given = os.environ.get(DAYS)
    try:
        days = _DAYS if not given else float(given)
    except ValueError:
        days = math.nan
    if not days >= 0:
        raise InputError(f"{DAYS} must be a number of days, 0 to keep runs for ever, got {given!r}")
    return days


def remove_old_runs(root: Path, now: float | None = None) -> Iterator[RemovedRun]:
    """Remove what is too old or too much in a folder of runs, but nothing that is worked on.

    Raises:
        InputError: `days_of_runs` does. OSError: one can't be removed.
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
            why = f"nothing of it was written for {days:g} days"
        elif left > MOST_BYTES and age > _FRESH_DAYS:
            why = f"all runs together took more than {MOST_BYTES // 10**9} GB"
        else:
            continue
        run.remove()
        left -= size
        yield RemovedRun(run.name, size, why)


def describe(removed: RemovedRun) -> str:
    """What is said of a run that was removed."""
    return (
        f"the run {removed.run}, which was broken off, is removed ({removed.why}; it took "
        f"{removed.num_bytes / 1e6:.1f} MB); {DAYS}=0 keeps runs for ever"
    )
