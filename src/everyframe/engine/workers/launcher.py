"""Run a request in worker processes, one per rank, and forward their events.

The parent process displays progress, writes files and survives any crash of a worker. A crash is
an error with the signal, the last position and a fix. Workers end when the parent ends, however it
ends. The first worker reports for all ranks. Imports no torch. `worker.py` is the other side;
`worker_monitor.py` describes crashed workers.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, DistributedOutOfMemoryError, EveryframeError
from everyframe.core.events import (
    Event,
    Events,
    FramesDecoded,
    Planned,
    RunSaved,
    VideoDone,
    WeightsReady,
)
from everyframe.core.plan import Plan
from everyframe.core.serialization import from_jsonable
from everyframe.engine.workers.error_transfer import error_from, with_resume_hint
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_monitor import HangDetector, crash_error
from everyframe.engine.workers.worker_process import (
    Worker,
    WorkerJob,
    check_memory_for_ranks,
)
from everyframe.runs.folder import RunFolder

#: Seconds for the error of a rank whose peers lost it.
_PATIENCE_LOST = 3.0
#: Seconds for the first rank's error after another rank's of the same fault; it writes a report.
_PATIENCE_SHARED = 10.0


class EventDeduplicator:
    """Filter out events that were already forwarded; `done` holds the seeds of finished videos."""

    def __init__(self) -> None:
        self.done: list[int] = []
        # By seed, and by the number among the videos of one call.
        self._frames: Counter[tuple[int, int | None]] = Counter()
        self._left_out: Counter[tuple[int, int | None]] = Counter()
        self._is_again = False

    def again(self) -> None:
        """Note that ranks restarted: events from here on may repeat earlier steps."""
        self._is_again, self._left_out = True, self._frames.copy()

    def new(self, event: Event) -> Event | None:
        """The event with only its new frames, or None if all of it was forwarded before."""
        if self._is_again and isinstance(event, (Planned, WeightsReady, RunSaved)):
            return None
        if isinstance(event, FramesDecoded):
            return self._new_frames(event)
        if isinstance(event, VideoDone):
            self.done.append(event.seed)
        return event

    def _new_frames(self, event: FramesDecoded) -> FramesDecoded | None:
        video = event.seed, event.index
        known = min(self._left_out[video], event.num_frames)
        self._left_out[video] -= known
        if known == event.num_frames:
            return None
        self._frames[video] += event.num_frames - known
        if not known:
            return event
        return replace(event, num_frames=event.num_frames - known, frames=event.frames[known:])


def ranks_of(run: RunFolder) -> int:
    """Number of ranks of an interrupted run."""
    plan = from_jsonable(run.run().get("plan"), lambda _: None)
    if not isinstance(plan, Plan):
        raise CorruptRunError(f"{run.path} holds no plan")
    return 1 if plan.parallel is None else len(plan.parallel.ranks)


Start = Callable[[WorkerJob], AbstractContextManager[Sequence[Worker]]]
"""Context: the workers of a job, one per rank, which have it; its end takes care of them."""


@contextmanager
def fresh_workers(job: WorkerJob) -> Iterator[Sequence[Worker]]:
    """Context: new workers for this job, all of which end with it."""
    workers: list[Worker] = []
    ranks = range(len(job.weights)) if job.local is None else [job.rank]
    check_memory_for_ranks(len(ranks))
    try:
        for rank in ranks:
            workers.append(Worker())
            workers[-1].give(replace(job, rank=rank))
        yield workers
        for worker in workers:
            if worker.has_ended:
                worker.end()
    finally:
        for worker in workers:
            worker.kill()


def run_in_workers(
    job: WorkerJob,
    place: Path | None = None,
    stop: StopSwitch | None = None,
    start: Start = fresh_workers,
) -> Events:
    """Run the job in worker processes and yield its events, as `everyframe.engine.run.stream` does.

    Workers use the working folder `place`. A finished run is removed once all of its events are
    consumed. Ranks that run out of memory during joint computation are stopped and restarted with a
    plan that needs less (`replan.py`). Raises any error of a worker; `WorkerDiedError` for a crash;
    `RunStoppedError` once `stop` is set, which leaves the run folder.
    """
    job = replace(job, place=place)
    # Workers start before the caller reads the first event.
    return _forward_events(job, start, stop, *_start_workers(job, start))


def _start_workers(job: WorkerJob, start: Start) -> tuple[ExitStack, Sequence[Worker]]:
    """Start the job's workers; closing the stack ends them."""
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="everyframe-", dir=job.temporary)
        folder = Path(stack.enter_context(made))
        meeting = folder / "meeting" if len(job.weights) > 1 and job.local is None else None
        job = replace(job, folder=folder, log_level=log_level(), meeting=meeting)
        workers = stack.enter_context(start(job))
        return stack.pop_all(), workers
    raise AssertionError("an exit stack swallows nothing")


def _forward_events(
    job: WorkerJob,
    start: Start,
    stop: StopSwitch | None,
    stack: ExitStack,
    workers: Sequence[Worker],
) -> Events:
    run = None if job.run is None else RunFolder(job.run)
    deduplicator = EventDeduplicator()
    while True:
        with stack:
            try:
                for event in _events(workers, stop):
                    if isinstance(event, RunSaved):
                        run = RunFolder(Path(event.path))
                    new = deduplicator.new(event)
                    if new is not None:
                        yield new
            except _WorkerExitedError as gone:
                raise crash_error(gone.worker, gone.worker.end(), run) from gone.__cause__
            except DistributedOutOfMemoryError as error:
                # Under torchrun the other ranks can't be restarted from here.
                if run is None or job.local is not None:
                    raise
                out_of_memory = error.out_of_memory
            except EveryframeError as error:
                raise with_resume_hint(error, run) from error.__cause__
            else:
                break
        deduplicator.again()
        skip = (*job.skip, *deduplicator.done)
        if job.request is not None and job.request.family_options.get("trust_remote_code"):
            job = replace(job, trust_remote_code=True)
        named = job.named if job.request is None else None
        again = replace(job, request=None, run=run.path, skip=skip, ranks=None,
                        out_of_memory=out_of_memory, named=named)  # fmt: skip
        stack, workers = _start_workers(again, start)
    if run is not None and not job.keeps_run:
        run.remove()


def _events(workers: Sequence[Worker], stop: StopSwitch | None = None) -> Iterator[Event]:
    """Events of the workers that report, until all have exited normally."""
    at_work = {worker.connection: worker for worker in workers}
    num_ranks = len(workers[0].job.weights)
    sees_all = len(workers) == num_ranks
    detector = HangDetector(workers, sees_all=sees_all) if num_ranks > 1 else None
    while at_work:
        for connection in _ready(at_work, detector, stop):
            assert isinstance(connection, Connection)
            worker = at_work[connection]
            try:
                name, value = worker.receive()
            except EOFError as error:
                raise _WorkerExitedError(worker) from error
            if name == "event":
                yield value
            elif name == "log":
                log_record(value)
            elif name == "error":
                worker, value = yield from _find_cause(worker, value, at_work, workers)
                raise error_from(value, worker.job.rank)
            else:
                assert name == "end", name
                del at_work[connection]


def _ready(
    at_work: dict[Connection, Worker], detector: HangDetector | None, stop: StopSwitch | None
) -> list[Any]:
    """Connections with data to read; raises `WorkerDiedError` if a rank hangs meanwhile."""
    stops = () if stop is None else (stop.connection,)
    while True:
        found = wait([*at_work, *stops], None if detector is None else 1.0)
        if stop is not None:
            stop.check()
        if found:
            return list(found)
        if detector is not None:
            detector.check(at_work.values())


def _find_cause(
    worker: Worker,
    value: dict[str, Any],
    at_work: dict[Connection, Worker],
    workers: Sequence[Worker],
) -> Generator[Event, None, tuple[Worker, dict[str, Any]]]:
    """Yield the remaining events of the other workers after a failure; return the worker at fault.

    The error of a rank that only lost a peer is less specific than that peer's. Other ranks lose
    their connection at once; the peer's message and exit status may arrive a little later
    (`_WorkerExitedError` for an exit without a message). All ranks of a video find the same values
    that are not finite; the first rank's error names its report. Returns the worker whose error
    explains the failure, and that error.
    """
    began, first = time.monotonic(), workers[0]
    others = {each: other for each, other in at_work.items() if other is not worker}
    while True:
        is_lost = value["class"] == "PeerLostError"
        is_shared = value["class"] == "NumericsError" and first in others.values()
        for each in workers if is_lost else ():
            if each.has_died():
                raise _WorkerExitedError(each)
        found = wait(list(others), 0.05 if is_lost or is_shared else 0)
        patience = _PATIENCE_LOST if is_lost else _PATIENCE_SHARED if is_shared else 0.0
        if not found and time.monotonic() - began >= patience:
            return worker, value
        for connection in found:
            assert isinstance(connection, Connection)
            other = others[connection]
            try:
                name, data = other.receive()
            except EOFError:
                del others[connection]
                continue
            if name == "event":
                yield data
            elif name == "log":
                log_record(data)
            elif name == "error":
                del others[connection]
                is_same = other is first and data["class"] == value["class"]
                if is_same or value["class"] == "PeerLostError":
                    worker, value = other, data


def log_level() -> str:
    """The level of log records that a worker is to send."""
    level: str = logging.getLevelName(logging.getLogger("everyframe").getEffectiveLevel())
    return level


def log_record(value: tuple[str, int, str]) -> None:
    """Log a record that a worker has sent."""
    source, level, text = value
    logging.getLogger(source).log(level, "%s", text)


class _WorkerExitedError(Exception):
    """A worker exited without a message."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker
