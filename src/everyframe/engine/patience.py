"""Finds a rank that hangs: the others wait for it, and it does nothing.

A rank that computes for long is none: its process uses the processor, or its trail goes on. So a
rank is given up only after a while in which nobody went on, it waited for nobody, and it used no
time of a core; or in which all waited for each other. No torch here. Read next: `trail.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from everyframe.core.errors import WorkerDiedError
from everyframe.engine.process import Worker
from everyframe.engine.trail import Whereabouts, read_trail

#: Seconds in which nothing happens until a rank is given up; an exchange takes a small part.
_SECONDS = 15.0
#: Seconds of a core in that time that are as good as none.
_IDLE = 0.5


class Patience:
    """Watches the workers of one run; `check` is called again and again.

    With `sees_all` there are no other ranks than these; those of somebody else may keep these ones
    waiting for good reasons.
    """

    def __init__(
        self, workers: Sequence[Worker], seconds: float = _SECONDS, *, sees_all: bool = True
    ) -> None:
        self._seconds = seconds
        self._sees_all = sees_all
        self._trails = {each.job.rank: b"" for each in workers}
        self._since = time.monotonic()
        self._used = {each.job.rank: 0.0 for each in workers}

    def check(self, workers: Iterable[Worker]) -> None:
        """Raise `WorkerDiedError` if one of those hangs; names it and what it was doing."""
        at_work = list(workers)
        now = time.monotonic()
        trails = {each.job.rank: _content(each.trail) for each in at_work}
        if any(self._trails[rank] != trail for rank, trail in trails.items()):
            self._trails |= trails
            self._begin(at_work, now)
            return
        if now - self._since < self._seconds:
            return
        where = {each.job.rank: read_trail(each.trail) for each in at_work}
        silent = [each for each in at_work if self._does_nothing(each, where[each.job.rank])]
        busy = [each for each in at_work if not where[each.job.rank].waiting and each not in silent]
        if busy:  # it computes, and the others wait: all is well
            self._begin(at_work, now)
            return
        if silent:
            first = silent[0].job.rank
            raise WorkerDiedError(
                f"rank {first} did nothing for {now - self._since:.0f} s {where[first]}, and the "
                "others waited for it; all were ended"
            )
        if not self._sees_all:
            return
        raise WorkerDiedError(
            f"all ranks waited for each other for {now - self._since:.0f} s: "
            + "; ".join(f"rank {rank} while {each.waiting}" for rank, each in where.items())
        )

    def _does_nothing(self, worker: Worker, where: Whereabouts) -> bool:
        """Whether it neither waits for others nor computes, or was stopped wherever it is."""
        if _state(worker.process_id) in ("T", "t"):
            return True
        # Before its first stage it may wait for processes of its own, which try fast paths.
        if where.waiting or not where.stage:
            return False
        return _core_seconds(worker.process_id) - self._used[worker.job.rank] < _IDLE

    def _begin(self, workers: Sequence[Worker], now: float) -> None:
        self._since = now
        for each in workers:
            self._used[each.job.rank] = _core_seconds(each.process_id)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _core_seconds(process: int) -> float:
    """Seconds of a core that a process has used so far; infinite where that says nothing.

    Who can't be seen to do nothing is not given up.
    """
    fields = _stat(process)
    if len(fields) < 13 or fields[0] == "D":  # "D": a disk has not answered yet
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(process: int) -> str:
    """The system's letter for what a process is at; empty where that can't be known."""
    return next(iter(_stat(process)), "")


def _stat(process: int) -> list[str]:
    """What Linux tells of a process, from its state on; nothing elsewhere."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
