"""Runs a request in worker processes, one a rank, and hands on what happens in them.

The process that is here shows, writes files and stays alive, whatever becomes of a worker: one that
dies is an error that says of what, where it was, and what to do. Workers end with this process,
however it ends; the first one speaks for all. No torch here. Read next: `worker.py` (the other
side), `obituary.py` (what is said of a dead one).
"""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from everyframe.core import errors
from everyframe.core.errors import EveryframeError, WorkerDiedError
from everyframe.core.events import Event, Events, Kept
from everyframe.core.plain import from_plain
from everyframe.core.request import Request
from everyframe.engine.obituary import kept_in, obituary
from everyframe.engine.patience import Patience
from everyframe.engine.torchrun import Torchrun
from everyframe.engine.wire import receive, send
from everyframe.runs.folder import RunFolder

#: In this process's environment: compute here, without a worker.
IN_PROCESS = "EVERYFRAME_IN_PROCESS"
#: Seconds that a worker has to end by itself once it has said all.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Job:
    """What a worker is to do: make a request, or go on with the run in the folder `run`.

    `root` is the folder of runs to keep it in, `output`, `as_uint8` and `pace` (see
    `everyframe.runs.keeper`) how. `rank` is one of ``len(weights)``, whose speeds are the plan's
    affair; they meet by the file `meeting` (see `everyframe.parallel.meeting`). Under torchrun this
    process has that one rank alone, and `local` is its number among those of this machine, and how
    many these are. `ranks` is what a run that was broken off goes on with in place of its own
    devices, by the names of the request's options. `folder` is for its trail and what it prints.
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
    folder: Path = field(default_factory=Path)
    log_level: str = "WARNING"

    def of_ranks(self, number: int, torchrun: Torchrun | None = None) -> Job:
        """The same job for so many ranks, or for those that torchrun started."""
        if torchrun is None or torchrun.size == 1:
            return replace(self, weights=(1.0,) * number)
        local = torchrun.local_rank, torchrun.local_size
        return replace(self, weights=(1.0,) * torchrun.size, rank=torchrun.rank, local=local)


def is_possible() -> bool:
    """Whether workers can be started here, and are not turned off by `IN_PROCESS`."""
    return os.name == "posix" and not os.environ.get(IN_PROCESS)


def ranks_of(run: RunFolder) -> int:
    """How many ranks a run that was broken off has."""
    plan = from_plain(run.run()["plan"], lambda _: None)
    return 1 if plan.division is None else len(plan.division.ranks)


def launched(job: Job, place: Path | None = None) -> Events:
    """What happens in the workers of that job, as `everyframe.engine.run.stream` yields it.

    They work in the folder `place`. A run that is over is removed when all of its events were
    taken. Raises what a worker raises; `WorkerDiedError` for one that died.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everyframe-")))
        level = logging.getLevelName(logging.getLogger("everyframe").getEffectiveLevel())
        meeting = folder / "meeting" if len(job.weights) > 1 and job.local is None else None
        job = replace(job, folder=folder, log_level=level, meeting=meeting)
        workers = stack.enter_context(_started(job, place))
        # Already at work while the caller does something else.
        return _handed_on(stack.pop_all(), job, workers)
    raise AssertionError("an exit stack swallows nothing")


def _handed_on(stack: ExitStack, job: Job, workers: list[Worker]) -> Events:
    run = None if job.run is None else RunFolder(job.run)
    with stack:
        try:
            for event in _events(workers):
                if isinstance(event, Kept):
                    run = RunFolder(Path(event.path))
                yield event
        except _GoneError as gone:
            raise obituary(gone.worker, gone.worker.end(), run) from gone.__cause__
        except WorkerDiedError as died:
            raise WorkerDiedError("; ".join([str(died), *kept_in(run)])) from died.__cause__
        for worker in workers:
            worker.end()
    if run is not None:
        run.remove()


class Worker:
    """One worker process, and the way to it."""

    def __init__(self, job: Job, place: Path | None) -> None:
        self.job = job
        self.connection, theirs = Pipe()
        assert isinstance(theirs, Connection)
        command = [sys.executable, "-m", "everyframe.engine.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=place
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


@contextmanager
def _started(job: Job, place: Path | None) -> Iterator[list[Worker]]:
    """The job's workers, all of which are gone afterwards."""
    workers: list[Worker] = []
    try:
        for rank in range(len(job.weights)) if job.local is None else [job.rank]:
            worker = Worker(replace(job, rank=rank), place)
            workers.append(worker)
            send(worker.connection, "job", worker.job)
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def _events(workers: list[Worker]) -> Iterator[Event]:
    """The events of those workers that speak, until all have ended well."""
    at_work = {worker.connection: worker for worker in workers}
    num_ranks = len(workers[0].job.weights)
    sees_all = len(workers) == num_ranks
    patience = Patience(workers, sees_all=sees_all) if num_ranks > 1 else None
    while at_work:
        for connection in _ready(at_work, patience):
            assert isinstance(connection, Connection)
            worker = at_work[connection]
            try:
                name, value = receive(connection)
            except (EOFError, ConnectionResetError) as error:
                raise _GoneError(worker) from error
            if name == "event":
                yield value
            elif name == "log":
                source, level, text = value
                logging.getLogger(source).log(level, "%s", text)
            elif name == "error":
                if value["class"] == "PeerLostError":
                    _check_who_went(workers)
                raise _raised_again(value)
            else:
                assert name == "end", name
                del at_work[connection]


def _ready(at_work: dict[Connection, Worker], patience: Patience | None) -> list[Any]:
    """The connections that have something; `WorkerDiedError` if a rank hangs meanwhile."""
    while True:
        found = wait(list(at_work), None if patience is None else 1.0)
        if found:
            return list(found)
        if patience is not None:
            patience.check(at_work.values())


def _check_who_went(workers: list[Worker]) -> None:
    """Raise `_GoneError` for the worker whose end the others have noticed, if there is one.

    The others lose their connection to it at once, the system tells of its end a little later.
    """
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        for worker in workers:
            if worker.has_died():
                raise _GoneError(worker)
        time.sleep(0.05)


class _GoneError(Exception):
    """A worker ended without a word."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker


class _InWorkerError(Exception):
    """Shows the worker's own traceback above ours."""

    def __str__(self) -> str:
        return "in the worker:\n" + "".join(self.args)


def _raised_again(told: dict[str, Any]) -> BaseException:
    """The error that was told, of its own class where that is ours or Python's."""
    name, text = told["class"], told["text"]
    own = getattr(errors, name, None)
    if isinstance(own, type) and issubclass(own, EveryframeError):
        return own(text)
    pythons = getattr(builtins, name, None)
    error: BaseException
    if told.get("strerror"):
        error = OSError(told["errno"], told["strerror"], told["file"])
    elif isinstance(pythons, type) and issubclass(pythons, Exception):
        error = pythons(text)
    else:
        error = EveryframeError(text) if "trace" not in told else RuntimeError(f"{name}: {text}")
    if "trace" in told:
        error.__cause__ = _InWorkerError(told["trace"])
    return error
