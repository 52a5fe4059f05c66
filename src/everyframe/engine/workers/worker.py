"""Worker process: receive jobs, run each, send its events, and write the flight recorder.

The worker ends when its parent does, however that ended; the parent handles Ctrl-C. Library output
goes to a file, log records go to the parent.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from everyframe.core.errors import EveryframeError, WorkerDiedError
from everyframe.core.events import (
    DENOISING_STAGES,
    ComponentLoaded,
    Event,
    Events,
    FramesDecoded,
    Planned,
    StageStarted,
    Step,
    WeightsReady,
)
from everyframe.core.facts import MachineFacts
from everyframe.core.garbage_collection import resume_collector
from everyframe.core.import_logs import mute_torchao_imports
from everyframe.core.plan import Plan
from everyframe.engine.workers.error_transfer import error_data
from everyframe.engine.workers.flight_recorder import FlightRecorder
from everyframe.engine.workers.module_watch import ModuleWatch
from everyframe.engine.workers.worker_process import WorkerJob, receive, send
from everyframe.hardware import memory

if TYPE_CHECKING:
    from everyframe.runtime.components.component_cache import ComponentCache


#: Events after which a run imports nothing large.
_LAST_IMPORTS = (WeightsReady, StageStarted)


def serve(descriptor: int) -> None:
    """Run the jobs received through that file descriptor, one after the other.

    It ends after a job that does not let it stay, and after an error of its own or of the device.
    """
    os.set_inheritable(descriptor, False)
    inbox = _Inbox(Connection(descriptor))
    gc.disable()  # until `resume_collector`, when all is imported that is needed
    own_output, process = os.dup(2), _ProcessState()
    if inbox.jobs.empty():  # it was started ahead of its job
        process.import_engine(inbox.connection)
    while True:
        job = inbox.jobs.get()
        if isinstance(job, Exception):
            raise job
        for number in (1, 2):  # standard output is the other process's
            os.dup2(own_output, number)
        run = _run_job if job.batch is None else _run_batch
        if not run(job, inbox, process):
            # At exit Python would scan all imports for a second, to no purpose.
            gc.freeze()
            return
        # A run that is stopped while it denoises leaves what it has freed to the next one's plan.
        memory.keep_freed_memory(False)
        memory.empty_cache()


def _run_job(job: WorkerJob, inbox: _Inbox, process: _ProcessState) -> bool:
    """Run a job and send its events; return whether this process can run another."""
    connection = inbox.connection
    process.log_to(connection, job.log_level)
    try:
        if job.place is not None:
            os.chdir(job.place)
        with (
            closing(process.recorder_of(job)) as recorder,
            closing(_events(job, recorder, process)) as events,
        ):
            _send_events(job, inbox, _record(events, recorder, process))
        if job.stays and len(job.weights) > 1:
            from everyframe.parallel.rendezvous import destroy

            destroy()
        send(connection, "end", {"waits": job.stays, "warm": process.warm()})
    except BrokenPipeError:
        return False  # the parent is gone
    except Exception as error:  # noqa: BLE001 - raised again in the other process
        # Only a user error on a single rank leaves the process in a known state.
        waits = job.stays and _is_ours(error) and len(job.weights) == 1
        send(connection, "error", {**error_data(error), "waits": waits, "warm": process.warm()})
        return waits
    return job.stays


def _send_events(job: WorkerJob, inbox: _Inbox, events: Iterator[Event]) -> None:
    """Send the events that the parent wants, until the last one or until it stops the job."""
    reports = job.rank == 0
    for event in events:
        if inbox.is_stopped.is_set():
            return
        if isinstance(event, _LAST_IMPORTS):
            resume_collector()
        if reports:
            send(inbox.connection, "event", _light(event, job.as_uint8))
        if isinstance(event, Planned):
            division = event.plan.parallel
        if isinstance(event, WeightsReady):
            # Download bars may be shown until now.
            _print_into(job.folder / f"printed-{job.rank}")
            # Until now events were the same on all ranks; from here on only within a video group.
            if job.local is None:
                reports = division is None or division.reports_events(job.rank)


def _run_batch(first: WorkerJob, inbox: _Inbox, process: _ProcessState) -> bool:
    """Run a job, and others of its batch that arrive meanwhile, until all have ended.

    Returns whether this process can run another.
    """
    from everyframe.engine.batched_runs import BatchedRuns, RunEnded

    batch, jobs, waits = BatchedRuns(), dict[int, tuple[WorkerJob, FlightRecorder]](), True
    halted = set[int]()  # whose consumers may be gone, with the files of their jobs

    def join(job: WorkerJob) -> None:
        process.log_to(inbox.connection, job.log_level)
        try:
            if job.place is not None:
                os.chdir(job.place)
            recorder = process.recorder_of(job)
        except (EveryframeError, OSError) as error:
            _send_end(error, job, inbox, process)
            return
        assert job.tag is not None, "a job of a batch"
        jobs[job.tag] = job, recorder
        batch.add(job.tag, lambda: _record(_events(job, recorder, process), recorder, process))

    join(first)
    try:
        for tag, event in batch.events():
            job, recorder = jobs[tag]
            halted |= inbox.take_stopped(jobs)
            if isinstance(event, RunEnded):
                del jobs[tag]
                # Module calls are recorded for another job of the batch.
                for _, other in jobs.values():
                    process.watch(other)
                recorder.close()
                is_gone = tag in halted and isinstance(event.error, OSError)
                error = None if is_gone else event.error
                waits = _send_end(error, job, inbox, process) and waits
            elif tag not in halted:
                if isinstance(event, _LAST_IMPORTS):
                    resume_collector()
                send(inbox.connection, "event", _light(event, job.as_uint8), tag)
                if isinstance(event, WeightsReady):
                    _print_into(job.folder / f"printed-{job.rank}")
            # A job without room waits for a run to end, or begins the next batch.
            while batch.has_room and (new := inbox.take_arrived()) is not None:
                join(new)
            halted |= inbox.take_stopped(jobs)
            for each in halted.intersection(jobs):
                batch.stop(each)
    except BrokenPipeError:
        return False  # the parent is gone
    return waits


def _send_end(
    error: Exception | None, job: WorkerJob, inbox: _Inbox, process: _ProcessState
) -> bool:
    """Send the end of a job of a batch; whether this process can run another."""
    waits = error is None or _is_ours(error)
    state = {"waits": waits, "warm": process.warm()}
    name, value = ("end", state) if error is None else ("error", {**error_data(error), **state})
    send(inbox.connection, name, value, job.tag)
    return waits


def _is_ours(error: Exception) -> bool:
    """Whether it is an error for the user, after which all is as before."""
    return isinstance(error, EveryframeError) and not isinstance(error, WorkerDiedError)


class _Inbox:
    """The parent's messages: jobs, and the word to stop one. This process ends with the parent.

    A thread reads them, whatever the others do.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.jobs: SimpleQueue[WorkerJob | Exception] = SimpleQueue()
        self.is_stopped = threading.Event()
        self._stopped: set[int] = set()
        threading.Thread(target=self._read, daemon=True).start()

    def take_arrived(self) -> WorkerJob | None:
        """The next job that has arrived, if one has; raises what went wrong with it."""
        job = None if self.jobs.empty() else self.jobs.get()
        if isinstance(job, Exception):
            raise job
        return job

    def take_stopped(self, tags: Collection[int]) -> set[int]:
        """Those of these jobs that were stopped; each is named once."""
        found = self._stopped.intersection(tags)
        self._stopped -= found
        return found

    def _read(self) -> None:
        try:
            while True:
                name, value = receive(self.connection)
                if name == "job":
                    self.is_stopped.clear()
                    self.jobs.put(value)
                else:
                    assert name == "stop", name
                    if value is None:
                        self.is_stopped.set()
                    else:
                        self._stopped.add(value)
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
        except Exception as error:  # noqa: BLE001 - raised where jobs are waited for
            self.jobs.put(error)


class _ProcessState:
    """What this process has from its first job on: its log, its watch over module calls."""

    def __init__(self) -> None:
        self._watch: ModuleWatch | None = None
        self._cache: ComponentCache | None = None
        self._logs = False
        self.import_error: Exception | None = None

    def import_engine(self, connection: Connection) -> None:
        """Import what every job needs before one is there; libraries raise an error only once."""
        self.log_to(connection, "WARNING")
        try:
            import everyframe.engine.distributed
            import everyframe.engine.run  # noqa: F401 - both for the modules that they bring
        except Exception as error:  # noqa: BLE001 - raised for the job
            self.import_error = error

    def recorder_of(self, job: WorkerJob) -> FlightRecorder:
        """A new flight recorder for the job."""
        return FlightRecorder(job.folder / f"trail-{job.rank}")

    def watch(self, recorder: FlightRecorder) -> ModuleWatch:
        """The watch over all module calls, which writes to that flight recorder."""
        if self._watch is None:
            self._watch = ModuleWatch(recorder)
        self._watch.write_to(recorder)
        return self._watch

    def log_to(self, connection: Connection, level: str) -> None:
        """Send log records of that level to the parent."""
        if not self._logs:
            self._logs = True
            _log_to(connection)
        logging.getLogger("everyframe").setLevel(level)

    def cache_of(self, job: WorkerJob) -> ComponentCache | None:
        """What stays from job to job; None for a worker that has one job."""
        if self._cache is None and job.stays:
            from everyframe.runtime.components.component_cache import ComponentCache

            self._cache = ComponentCache()
        return self._cache

    def warm(self) -> list[tuple[str, int, float, str]]:
        """What stays: model, bytes, time of the last use and device of each component."""
        return [] if self._cache is None else [*self._cache.models()]


def _print_into(path: Path) -> None:
    """Redirect all output to a file, including the stack dump of a fatal signal."""
    file = path.open("wb")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file)


def _log_to(connection: Connection) -> None:
    class ToTheOther(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            send(connection, "log", [record.name, record.levelno, self.format(record)])

    logging.getLogger().addHandler(ToTheOther())
    mute_torchao_imports()
    logging.captureWarnings(True)


def _events(job: WorkerJob, recorder: FlightRecorder, process: _ProcessState) -> Events:
    if process.import_error is not None:
        raise process.import_error
    # Late import: brings torch, and the job should have arrived by then.
    from everyframe.engine.distributed import Rendezvous
    from everyframe.engine.resumption.resume import resume_run
    from everyframe.engine.run import stream
    from everyframe.parallel.communicator import Communicator
    from everyframe.parallel.rendezvous import join_ranks
    from everyframe.runs.folder import RunFolder
    from everyframe.runs.run_state import SaveInterval, SaveOptions

    cache = process.cache_of(job)
    pace = SaveInterval(*job.pace) if job.pace is not None else SaveInterval()

    def together(kind: str) -> Communicator:
        recorder.wait("ranks meet")
        is_local = job.local is None or job.local[1] == len(job.weights)
        group = join_ranks(job.rank, job.weights, job.meeting, kind=kind, is_local=is_local)
        group.waits = recorder.wait
        return group

    join = Rendezvous(job.rank, together, job.local) if len(job.weights) > 1 else None
    if job.run is not None:
        run = RunFolder(job.run)
        return resume_run(
            run, skip=job.skip, cleans=False, pace=pace, join=join, ranks=job.ranks,
            out_of_memory=job.out_of_memory, trust_remote_code=job.trust_remote_code,
            named=job.named, cache=cache,
        )  # fmt: skip
    keeps = job.root if job.rank == 0 else None
    keep = SaveOptions(keeps, job.output, job.as_uint8, cleans=False, pace=pace, name=job.run_name)
    if job.run_name is not None:
        keep = replace(keep, parts=job.root)
    assert job.request is not None
    if job.plans:
        return _plan(job, cache)
    return stream(job.request, num_threads=job.num_threads, keep=keep, join=join, cache=cache)


def _plan(job: WorkerJob, cache: ComponentCache | None) -> Events:
    """The plan of the job's request, which will have the memory of all that stays."""
    from everyframe.planning.resolve import resolve

    def freed(facts: MachineFacts) -> MachineFacts:
        return facts.with_freed({} if cache is None else cache.num_bytes(), job.free_memory)

    assert job.request is not None
    yield Planned(resolve(job.request, freed=freed))


def _record(events: Iterator[Event], recorder: FlightRecorder, process: _ProcessState) -> Events:
    """Pass events through and record stages and steps in the flight recorder."""
    watch = process.watch(recorder)
    stage, num_steps, has_spare_memory = "", 0, False
    for event in events:
        if isinstance(event, Planned):
            has_spare_memory = _has_spare_memory(event.plan)
        elif isinstance(event, StageStarted):
            stage, num_steps = event.stage, event.num_steps
            # Every step asks for the same blocks; a decoder's grow, which leaves gaps.
            memory.keep_freed_memory(has_spare_memory and stage in DENOISING_STAGES)
            recorder.at(stage, 1, num_steps)
            watch.begin()
        elif isinstance(event, ComponentLoaded):
            watch.add(event.component)
            memory.empty_cache()  # of what loading has freed
        elif isinstance(event, Step):
            recorder.at(stage, event.step + 1, num_steps)
            if event.step == num_steps and stage in DENOISING_STAGES:  # a pipeline decodes after it
                memory.keep_freed_memory(False)
                memory.empty_cache()
        yield event


def _has_spare_memory(plan: Plan) -> bool:
    """Whether a CPU computes and has twice the memory that is forecast for all ranks."""
    num_ranks = 1 if plan.parallel is None else len(plan.parallel.ranks)
    device = plan.device
    return device.kind == "cpu" and 2 * num_ranks * plan.peak_bytes <= device.free_memory


def _light(event: Event, as_uint8: bool) -> Event:
    """The event with frames in the format that the parent wants."""
    if not (isinstance(event, FramesDecoded) and as_uint8):
        return event
    from everyframe.media.pixels import to_uint8

    return replace(event, frames=to_uint8(event.frames))
