"""A worker process as the one that started it sees it, and what it is told to do.

Not here: when one is started and what becomes of what it says (`launch.py`), and its own side
(`worker.py`). No torch here. Read next: `launch.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from everyframe.core.errors import Scarcity
from everyframe.core.request import Request
from everyframe.core.safe_path import SAFE_PATH, SAFE_PATH_VARIABLE
from everyframe.engine.torchrun import Torchrun

#: Seconds that a worker has to end by itself once it has said all.
_PATIENCE = 20.0

#: What a worker runs. Neither the current folder nor that of the caller's script is on its path;
#: this package is found where it was found here, after everything else.
_START = (
    f"{SAFE_PATH}sys.path.append(sys.argv[2]); "
    "from everyframe.engine.worker import serve; serve(int(sys.argv[1]))"
)
_PLACE_OF_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Job:
    """What a worker is to do: make a request, or go on with the run in the folder `run`.

    `root` is the folder of runs to keep it in, `output`, `as_uint8` and `pace` (see
    `everyframe.runs.keeper`) how. `rank` is one of ``len(weights)``, whose speeds are the plan's
    affair; they meet by the file `meeting` (see `everyframe.parallel.meeting`). Under torchrun this
    process has that one rank alone, and `local` is its number among those of this machine, and how
    many these are. `ranks` is what a run that was broken off goes on with in place of its own
    devices, by the names of the request's options; `scarcity` what it lacked memory for, to be done
    in less from here on. `trust_remote_code` is said by the person who goes on with it. `folder` is
    for its trail and what it prints.
    """

    request: Request | None = None
    run: Path | None = None
    num_threads: int | None = None
    root: Path | None = None
    output: str | None = None
    as_uint8: bool = False
    skip: tuple[int, ...] = ()
    pace: tuple[float, float] | None = None
    rank: int = 0
    weights: tuple[float, ...] = (1.0,)
    meeting: Path | None = None
    local: tuple[int, int] | None = None
    ranks: Mapping[str, Any] | None = None
    scarcity: Scarcity | None = None
    trust_remote_code: bool = False
    folder: Path = field(default_factory=Path)
    log_level: str = "WARNING"

    def of_ranks(self, number: int, torchrun: Torchrun | None = None) -> Job:
        """The same job for so many ranks, or for those that torchrun started."""
        if torchrun is None or torchrun.size == 1:
            return replace(self, weights=(1.0,) * number)
        local = torchrun.local_rank, torchrun.local_size
        return replace(self, weights=(1.0,) * torchrun.size, rank=torchrun.rank, local=local)


class Worker:
    """One worker process, and the way to it."""

    def __init__(self, job: Job, place: Path | None) -> None:
        self.job = job
        self.connection, theirs = Pipe()
        assert isinstance(theirs, Connection)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), _PLACE_OF_PACKAGE],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=place,
            env={**os.environ, SAFE_PATH_VARIABLE: "1"},
        )
        theirs.close()

    @property
    def trail(self) -> Path:
        """The file that says what it was at; see `read_trail`."""
        return self.job.folder / f"trail-{self.job.rank}"

    def printed(self) -> str:
        """What was printed in it."""
        path = self.job.folder / f"printed-{self.job.rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def process_id(self) -> int:
        """The system's number of it."""
        return self._process.pid

    def has_died(self) -> bool:
        """Whether it has ended, and not well."""
        return self._process.poll() not in (None, 0)

    def end(self) -> int:
        """Wait until it has ended by itself, or end it; its exit code, negative for a signal."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once; its exit code, negative for a signal."""
        self._process.kill()
        code = self._process.wait()
        self.connection.close()
        return code
