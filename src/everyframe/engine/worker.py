"""Worker process: receive a job, run it, send its events, and write the flight recorder.

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
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from everyframe.checkpoints.read_progress import watch_reads
from everyframe.core.events import (
    ComponentLoaded,
    Event,
    FramesDecoded,
    Planned,
    StageStarted,
    Step,
    WeightsReady,
)
from everyframe.engine.error_transfer import error_data
from everyframe.engine.flight_recorder import FlightRecorder
from everyframe.engine.worker_process import WorkerJob, receive, send


def serve(descriptor: int) -> None:
    """Run the job received through that file descriptor."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    gc.disable()  # until all is imported that is needed; see `core.collector`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, job = receive(connection)
    assert name == "job", name
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    os.dup2(2, 1)  # standard output is the other process's
    _log_to(connection, job.log_level)
    try:
        trail = FlightRecorder(job.folder / f"trail-{job.rank}")
        speaks = job.rank == 0
        for event in _watched(_events(job, trail), trail):
            if isinstance(event, (WeightsReady, StageStarted)):
                gc.enable()
            if speaks:
                send(connection, "event", _light(event, job.as_uint8))
            if isinstance(event, Planned):
                division = event.plan.parallel
            if isinstance(event, WeightsReady):
                # Until then bars of what is fetched may be shown.
                _print_into(job.folder / f"printed-{job.rank}")
                # What was asked is the same for all ranks; what is made, only for those of a group.
                if job.local is None:
                    speaks = division is None or division.reports_events(job.rank)
        send(connection, "end")
    except BrokenPipeError:
        return  # nobody is there to read it
    except Exception as error:  # noqa: BLE001 - raised again in the other process
        send(connection, "error", error_data(error))


def _end_with(connection: Connection) -> None:
    """End this process when the parent ends, whatever this process is doing.

    The parent sends nothing more, so the wait ends only when the parent is gone.
    """
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _print_into(path: Path) -> None:
    """Redirect all output to a file, including the stack dump of a fatal signal."""
    file = path.open("wb")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file)


def _log_to(connection: Connection, level: str) -> None:
    class ToTheOther(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            send(connection, "log", [record.name, record.levelno, self.format(record)])

    logging.getLogger().addHandler(ToTheOther())
    logging.getLogger("everyframe").setLevel(level)
    logging.captureWarnings(True)


def _events(job: WorkerJob, trail: FlightRecorder) -> Iterator[Event]:
    # Not on top: this brings torch, and the job should be there when it comes.
    from everyframe.engine.distributed import Rendezvous
    from everyframe.engine.resume import resume_run
    from everyframe.engine.run import stream
    from everyframe.parallel.communicator import Communicator
    from everyframe.parallel.rendezvous import join_ranks
    from everyframe.planning.resolve import resolve
    from everyframe.runs.folder import RunFolder
    from everyframe.runs.run_state import SaveInterval, SaveOptions

    pace = SaveInterval(*job.pace) if job.pace is not None else SaveInterval()

    def together(kind: str) -> Communicator:
        trail.wait("ranks meet")
        is_local = job.local is None or job.local[1] == len(job.weights)
        team = join_ranks(job.rank, job.weights, job.meeting, kind=kind, is_local=is_local)
        team.waits = trail.wait
        return team

    join = Rendezvous(job.rank, together, job.local) if len(job.weights) > 1 else None
    if job.run is not None:
        run = RunFolder(job.run)
        return resume_run(
            run, skip=job.skip, cleans=False, pace=pace, join=join, ranks=job.ranks,
            scarcity=job.scarcity, trust_remote_code=job.trust_remote_code, named=job.named,
        )  # fmt: skip
    keeps = job.root if job.rank == 0 else None
    keep = SaveOptions(keeps, job.output, job.as_uint8, cleans=False, pace=pace, name=job.run_name)
    if job.run_name is not None:
        keep = replace(keep, parts=job.root)
    assert job.request is not None
    if job.plans:
        return iter([Planned(resolve(job.request))])
    return stream(job.request, num_threads=job.num_threads, keep=keep, join=join)


def _watched(events: Iterator[Event], trail: FlightRecorder) -> Iterator[Event]:
    """Pass events through and record stages and steps in the flight recorder."""
    watch = _Watch(trail)
    stage, num_steps = "", 0
    for event in events:
        if isinstance(event, StageStarted):
            stage, num_steps = event.stage, event.num_steps
            trail.at(stage, 1, num_steps)
            watch.begin()
        elif isinstance(event, ComponentLoaded):
            watch.loaded(event.component)
        elif isinstance(event, Step):
            trail.at(stage, event.step + 1, num_steps)
        yield event


class _Watch:
    """Record each module call in the flight recorder, by a global module hook.

    Modules are identified by memory address and not referenced; a reference would keep weights
    alive.
    """

    def __init__(self, trail: FlightRecorder) -> None:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._trail = trail
        watch_reads(trail.read)
        self._tensor = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        self._components: list[str] = []
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[Any, int] = {}
        register_module_forward_pre_hook(self._before)
        # The hook is ours, and does nothing while a module is compiled.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        # It is diffusers that calls it so, and what that takes is in the plan.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")

    def begin(self) -> None:
        """Forget all modules at a new stage; others may take their addresses."""
        self._components.clear()
        self._numbers.clear()

    def loaded(self, component: str) -> None:
        """Register a component of this stage."""
        self._components.append(component)
        self._numbers.clear()

    def _before(self, module: Any, given: tuple[Any, ...]) -> None:
        if self._is_compiling():
            return
        number = self._numbers.get(id(module)) or self._learn(module)
        if given and isinstance(given[0], self._tensor):
            first = given[0]
            dtype = self._dtypes.get(first.dtype)
            if dtype is None:
                name = str(first.dtype).removeprefix("torch.")
                dtype = self._dtypes[first.dtype] = self._trail.learn(name)
            self._trail.enter(number, dtype, first.shape)
        else:
            self._trail.enter(number, 0, ())

    def _learn(self, module: Any) -> int:
        """Number the module and its submodules; the first module called is the outermost."""
        alone = self._components[0] if len(self._components) == 1 else type(module).__name__
        for name, part in module.named_modules():
            place = ".".join(each for each in (alone, name) if each)
            name = f"{place} ({type(part).__name__})"
            self._numbers[id(part)] = self._trail.learn(name)
        return self._numbers[id(module)]


def _light(event: Event, as_uint8: bool) -> Event:
    """The event with frames in the format that the parent wants."""
    if not (isinstance(event, FramesDecoded) and as_uint8):
        return event
    from everyframe.media.pixels import to_uint8

    return FramesDecoded(event.seed, event.num_frames, to_uint8(event.frames))
