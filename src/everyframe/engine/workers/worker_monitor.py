"""Detect hung workers and describe crashed ones.

A rank counts as hung after 15 s in which no rank made progress and this rank neither waited for a
peer, used CPU time (< 0.5 s) nor read data (< 64 KiB); or in which all ranks waited for each other
(deadlock). The limit is 300 s while it reads weights or the system waits for a disk on its behalf,
since a network share may take minutes to wake up. Long computations are not hangs: they use CPU
time or advance the flight recorder. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everyframe.core.errors import WorkerDiedError
from everyframe.core.facts import MachineFacts
from everyframe.engine.workers.flight_recorder import LastPosition, read_last_position
from everyframe.engine.workers.worker_process import Worker
from everyframe.hardware.device_loss import loss_in
from everyframe.hardware.facts import query_machine
from everyframe.hardware.isolation import signal_name
from everyframe.hardware.known_issues import Issue, explaining, find
from everyframe.runs.folder import RunFolder
from everyframe.runs.resume_hint import resume_hint

#: Seconds without progress after which a rank counts as hung; an exchange takes far less.
_SECONDS = 15.0
#: The same for a rank that waits for a disk.
_SECONDS_OF_A_DISK = 300.0
#: CPU seconds, and bytes read, up to which a rank counts as idle.
_IDLE, _FEW_BYTES = 0.5, 2**16


class HangDetector:
    """Detect hangs among the workers of one run; call `check` repeatedly.

    With `sees_all` these are all ranks of the run. Otherwise ranks elsewhere may have good reasons
    to keep these waiting, and waiting for each other is not an error.
    """

    def __init__(
        self, workers: Sequence[Worker], seconds: float = _SECONDS, *, sees_all: bool = True
    ) -> None:
        self._seconds = seconds
        self._sees_all = sees_all
        self._contents = {each.job.rank: b"" for each in workers}
        self._since = self._looked = time.monotonic()
        # Activity of each rank when that time began, and the time of its last activity.
        self._done = {each.job.rank: _Work() for each in workers}
        self._active = dict.fromkeys(self._done, self._since)

    def check(self, workers: Iterable[Worker]) -> None:
        """Raise `WorkerDiedError` if a worker hangs, with its rank and last position."""
        at_work = list(workers)
        now = time.monotonic()
        contents = {each.job.rank: _content(each.recorder_file) for each in at_work}
        went_on = [rank for rank, content in contents.items() if self._contents[rank] != content]
        looked, self._looked = self._looked, now
        if now - looked >= self._seconds:
            went_on = [*contents]  # this process was stopped (Ctrl-Z), and all ranks with it
        if went_on:
            self._contents |= contents
            self._active |= dict.fromkeys(went_on, now)
            self._begin(at_work, now)
            return
        if now - self._since < self._seconds:
            return
        where = {each.job.rank: read_last_position(each.recorder_file) for each in at_work}
        silent = [each for each in at_work if self._does_nothing(each, where[each.job.rank], now)]
        busy = [each for each in at_work if not where[each.job.rank].waiting and each not in silent]
        if busy:  # it computes, and the others wait: all is well
            self._begin(at_work, now)
            return
        if silent:
            first = silent[0].job.rank
            raise WorkerDiedError(
                f"rank {first} did nothing for {now - self._active[first]:.0f} s {where[first]}"
                f"{', which reads weights' * where[first].is_reading}, and the others waited for "
                "it; all were ended"
            )
        if not self._sees_all:
            return
        raise WorkerDiedError(
            f"all ranks waited for each other for {now - self._since:.0f} s: "
            + "; ".join(f"rank {rank} while {each.waiting}" for rank, each in where.items())
        )

    def _does_nothing(self, worker: Worker, where: LastPosition, now: float) -> bool:
        """Whether it is idle past the limit without waiting for others, or stopped by a signal.

        A process whose activity can't be measured counts as active.
        """
        state, rank = _state(worker.process_id), worker.job.rank
        if state in ("T", "t"):
            return True
        # Before its first stage it may wait for its own processes, which try fast paths.
        if where.waiting or not where.stage:
            return False
        work = _Work.of(worker.process_id)
        if work is None or work.is_more_than(self._done[rank]):
            self._active[rank] = now
            return False
        waits_for_a_disk = where.is_reading or state == "D"
        limit = max(self._seconds, _SECONDS_OF_A_DISK) if waits_for_a_disk else self._seconds
        return now - self._active[rank] >= limit

    def _begin(self, workers: Sequence[Worker], now: float) -> None:
        self._since = now
        for each in workers:
            self._done[each.job.rank] = _Work.of(each.process_id) or _Work()


@dataclass(frozen=True)
class _Work:
    """Activity of a process so far: CPU seconds and bytes read from anywhere."""

    seconds: float = 0.0
    num_bytes: int = 0

    @classmethod
    def of(cls, process: int) -> _Work | None:
        """Measure a process; None if the system doesn't report it."""
        seconds = _core_seconds(process)
        return None if seconds is None else cls(seconds, _bytes_read(process))

    def is_more_than(self, before: _Work) -> bool:
        """Whether the activity since `before` is more than idle."""
        is_busy = self.seconds - before.seconds >= _IDLE
        return is_busy or self.num_bytes - before.num_bytes >= _FEW_BYTES


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _core_seconds(process: int) -> float | None:
    """CPU seconds used by a process so far; None if the system doesn't report it."""
    fields = _stat(process)
    if len(fields) < 13:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bytes_read(process: int) -> int:
    """Bytes read by a process so far, by system calls and mapped files; 0 if not reported."""
    fields = _stat(process)
    pages = int(fields[9]) if len(fields) >= 13 else 0  # those that a disk had to bring
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        lines = []  # another user's process, or a system without
    counted = dict(line.split(": ", 1) for line in lines if ": " in line)
    called, from_disk = (int(counted.get(name, 0)) for name in ("rchar", "read_bytes"))
    return pages * os.sysconf("SC_PAGE_SIZE") + called + from_disk


def _state(process: int) -> str:
    """Process state letter of the system; empty if unknown."""
    return next(iter(_stat(process)), "")


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty where there is no Linux."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


#: Libraries relevant to GPU crashes, and their display names.
_LIBRARIES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "hipblas": "hipBLAS", "nccl": "NCCL"}


#: What Python and OpenBLAS print where a process or thread can't be started.
_NO_MORE_PROCESSES = ("can't start new thread", "Resource temporarily unavailable")


def crash_error(worker: Worker, code: int, run: RunFolder | None) -> WorkerDiedError:
    """Build the error for a crashed worker: signal, last position, matching known issue, fix.

    `code` is the exit code, negative for a signal. `run` is the folder with the saved progress.
    """
    where = read_last_position(worker.recorder_file)
    rank = f" of rank {worker.job.rank}" if len(worker.job.weights) > 1 else ""
    # A negative code is the signal that ended it.
    died = f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    findings = [f"the worker process{rank} {died} {where}"]
    if code == -9:
        findings.append(
            "the system most likely killed it because host memory ran out: use a smaller --size "
            "or --num-frames; `everyframe plan` forecasts the memory"
        )
    elif any(words in worker.read_output() for words in _NO_MORE_PROCESSES):
        findings.append(
            "the system lets this user start no further process or thread: raise that limit "
            "(ulimit -u, or pids.max of a container), or end some"
        )
    elif (loss := loss_in(worker.read_output())) is not None:
        findings.append(f"its device was lost {loss}")
    else:
        facts = query_machine().machine
        findings += _of_the_machine(facts, signal_name(-code), worker.read_output())
    return WorkerDiedError("; ".join(filter(None, [*findings, resume_hint(run)])))


def _of_the_machine(machine: MachineFacts, signal: str, printed: str) -> list[str]:
    """Loaded libraries, the matching known issue and its fix."""
    software, findings = machine.software, []
    if software is not None:
        loaded = [
            f"{title} {version}"
            for name, title in _LIBRARIES.items()
            if (version := software.library(name)) is not None
        ]
        torch = software.packages.get("torch")
        findings.append("loaded were " + ", ".join([f"torch {torch}", *loaded]))
    issue = matching(machine, signal, printed)
    if issue is None:
        findings.append(
            "no known issue matches; `everyframe doctor` tries what this machine can do"
        )
        return findings
    fix = issue.fix[0]
    command = f": {fix.command}" if fix.command else ""
    findings.append(f"known issue ({issue.id}: {issue.title}); {fix.do}{command}")
    return findings


def matching(machine: MachineFacts, signal: str, printed: str) -> Issue | None:
    """The most likely known issue: one of this machine that names this signal.

    The worker's output may also match an issue by its own text.
    """
    if machine.software is None:
        return None
    here = [match.issue for match in find(machine)]
    by_words = [issue for issue in explaining(printed) if issue in here]
    by_signal = [issue for issue in here if issue.severity == "crash" and _tells(issue, signal)]
    return next(iter([*by_words, *by_signal]), None)


def _tells(issue: Issue, signal: str) -> bool:
    return signal in " ".join((issue.title, issue.symptom, issue.cause, *issue.messages))
