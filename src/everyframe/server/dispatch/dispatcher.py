"""Dispatcher: threads of each device group claim jobs, run them, and decide what follows.

A group has one thread for each job that it may run at the same time (`device_groups.py`). The files
of a job are finished while the next job runs. After an attempt that was stopped or died, the job
returns to the queue, and its next attempt resumes the run.

Read next: `attempt.py`, `store.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from everyframe.core.errors import (
    CannotRunError,
    CorruptRunError,
    DevicesBusyError,
    DistributedOutOfMemoryError,
    EveryframeError,
    InputError,
    LeftBatchError,
    NoSuchVideoError,
    OutOfMemoryInfo,
    RunLockedError,
    RunStoppedError,
    StoreError,
    WorkerDiedError,
)
from everyframe.core.events import Event
from everyframe.core.paths import is_disk_full
from everyframe.core.plan import Plan
from everyframe.engine.workers.executor import Executor
from everyframe.fast_paths.batch_certificates import MOST_VIDEOS
from everyframe.server.dispatch.attempt import Attempt, AttemptOptions
from everyframe.server.dispatch.device_groups import ChangeNotifier, Claim, DeviceGroup
from everyframe.server.dispatch.retention import CLEAN_SECONDS, clean
from everyframe.server.errors import code_of, is_system_exhausted, message_of
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore

_log = logging.getLogger(__name__)

#: Failed attempts of a job, one after the other without a step between, after which it fails.
MAX_ATTEMPTS = 3
#: Room on the disk below which no job begins.
MIN_FREE_BYTES = 256 * 2**20
#: Jobs in a row that may go before older ones because their model is warm.
WARM_AHEAD = 4
#: Seconds between two looks whether an obstacle is gone, and whether a thread has ended.
_PAUSE = 0.25
#: Longest wait of an idle group, in seconds; a new job ends it at once.
_IDLE_SECONDS = 1.0
#: Seconds that stopped jobs have to end.
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class DispatcherOptions(AttemptOptions):
    """How a dispatcher works.

    Attributes:
        groups: devices of each group by its name, such as ``0,1``; None is the plan's choice.
        max_attempts: failed attempts in a row after which a job fails.
        warm_ahead: jobs in a row that may go first because their model is already loaded.
        min_free_bytes: free disk space below which no job begins.
        max_batch: maximum number of jobs that a group runs as one batch.
    """

    groups: Mapping[str, str | None] = field(default_factory=lambda: {"default": None})
    max_attempts: int = MAX_ATTEMPTS
    warm_ahead: int = WARM_AHEAD
    min_free_bytes: int = MIN_FREE_BYTES
    max_batch: int = MOST_VIDEOS


PreviewListener = Callable[[str, Event], None]


class Dispatcher:
    """Runs the jobs of a store on an executor. All methods are thread-safe."""

    def __init__(
        self, store: JobStore, executor: Executor, options: DispatcherOptions | None = None
    ) -> None:
        options = options or DispatcherOptions()
        self._store = store
        self._executor = executor
        self._options = replace(options, on_preview=self._take_preview)
        self._attempts: dict[str, Attempt] = {}
        self._out_of_memory: dict[str, OutOfMemoryInfo] = {}
        self._previews: dict[str, Event] = {}
        self._listeners: list[PreviewListener] = []
        self._lock = threading.Lock()
        self._draining = threading.Event()
        self._ended = threading.Event()
        self._changes = ChangeNotifier()
        self._problem: str | None = None
        self._logged: set[str] = set()
        most = options.max_batch if executor.has_batches else 1
        self._groups = [
            DeviceGroup(name, devices, most, options.warm_ahead)
            for name, devices in options.groups.items()
        ]
        self._finisher = ThreadPoolExecutor(most * len(self._groups), "files of jobs")
        self._threads = [
            threading.Thread(target=self._work, args=(group,), name=f"group {group.name}")
            for group in self._groups
            for _ in range(most)
        ] + [threading.Thread(target=self._clean, name="retention")]

    def start(self) -> list[Job]:
        """Recover the jobs of an earlier server, and start the threads; returns those jobs."""
        back = self._store.recover()
        self._store.keep_groups([*self._options.groups])
        self._store.listen(lambda event: self._changes.note() if event.type == "status" else None)
        for thread in self._threads:
            thread.start()
        return back

    @property
    def is_draining(self) -> bool:
        """Whether no further job begins."""
        return self._draining.is_set()

    @property
    def problem(self) -> str | None:
        """Why no job begins, in a sentence; None if jobs begin."""
        return self._problem

    @property
    def groups(self) -> dict[str, str | None]:
        """Id of the job that each device group runs, by the group's name; of a batch, its first."""
        return {group.name: group.job for group in self._groups}

    @property
    def paused_groups(self) -> dict[str, str]:
        """Groups whose devices do not work, and why."""
        found = {group.name: group.health.problem for group in self._groups}
        return {name: why for name, why in found.items() if why is not None}

    def cancel(self, id: str, wait: float = 0.0) -> Job:  # noqa: A002
        """Cancel a job; a running one is stopped, and `wait` bounds the seconds until it has.

        Its run stays for a retry. Raises `NoSuchVideoError` if there is no such job.
        """
        job = self._store.request_cancel(id)
        with self._lock:
            attempt = self._attempts.get(id)
        if attempt is not None and not job.is_final:
            attempt.halt("cancel")
        until = time.monotonic() + wait
        while not job.is_final and (left := until - time.monotonic()) > 0:
            last = self._store.last_event
            job = self._store.get(id) or job
            if not job.is_final:
                self._store.wait(last, left)
        return job

    def preview(self, id: str) -> Event | None:  # noqa: A002
        """The last preview of a running job."""
        return self._previews.get(id)

    def listen_previews(self, listener: PreviewListener) -> Callable[[], None]:
        """Call `listener` with (id, `Preview`) for each new preview; the result ends that.

        It is called in the thread of the job, must not raise and must not block.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def drain(self, seconds: float = 0.0) -> None:
        """Begin no further job, give running jobs `seconds` to finish, then stop them.

        Stopped jobs are queued again with their run, and the attempt isn't counted. Returns once
        all have ended, a few seconds after `seconds` at the latest.
        """
        self._draining.set()
        self._changes.note()
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(thread.is_alive() for thread in self._threads):
            if self._ended.wait(min(_PAUSE, max(until - time.monotonic(), 0.0))):
                break
        self.stop_now()
        until = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0.0))
        self._finisher.shutdown()

    def stop_now(self) -> None:
        """End a drain's wait for running jobs at once."""
        self._ended.set()
        with self._lock:
            attempts = [*self._attempts.values()]
        for attempt in attempts:
            attempt.halt("drain")

    def _take_preview(self, id: str, event: Event) -> None:  # noqa: A002
        self._previews[id] = event
        for listener in tuple(self._listeners):
            listener(id, event)

    def _work(self, group: DeviceGroup) -> None:
        """Run jobs of one group, one at a time in this thread, until the server drains."""
        ends: Future[None] | None = None
        while not self._draining.is_set():
            seen, claim, problem = self._changes.count, None, None
            try:
                problem = self._obstacle()
                if problem is None:
                    claim = group.claim(self._store)
                    self._logged.clear()
            except (StoreError, OSError) as error:
                problem = str(error)
                self._log_once(f"no job begins: {error}")
            self._problem = problem
            if claim is not None:
                # One job may wait for its files while the next one runs, and no more.
                ends, before = self._run(claim, group), ends
                if before is not None:
                    before.result()
            elif problem:
                self._draining.wait(_PAUSE)
            elif not self._draining.is_set():
                self._changes.wait(seen, _IDLE_SECONDS)

    def _clean(self) -> None:
        """Delete expired jobs and files at intervals, until the server drains."""
        while not self._draining.wait(CLEAN_SECONDS):
            try:
                clean(self._store)
            except (StoreError, OSError) as error:
                _log.error("expired jobs can't be deleted: %s", error)

    def _obstacle(self) -> str | None:
        free = self._store.folder.free_bytes()
        if free >= self._options.min_free_bytes:
            return None
        return (
            f"the disk of the data folder has {free / 2**20:.0f} MiB left; jobs wait until there "
            f"are {self._options.min_free_bytes / 2**20:.0f} MiB"
        )

    def _run(self, claim: Claim, group: DeviceGroup) -> Future[None] | None:
        """Run a job; returns the work that remains after it, if any."""
        job, out_of_memory = claim.job, self._out_of_memory.pop(claim.job.id, None)

        def take_plan(plan: Plan) -> None:
            group.note_plan(plan)
            self._changes.note()  # others may join now

        def note_end() -> None:
            group.note_end(job.id)
            self._changes.note()  # the next one may be handed over

        attempt = Attempt(
            job, self._store, self._executor, self._options, group.devices, out_of_memory,
            batch=claim.batch, on_plan=take_plan, on_frames=note_end,
        )  # fmt: skip
        with self._lock:
            self._attempts[job.id] = attempt
        try:
            # Between the claim and here, nobody knew whom to halt.
            now = self._store.get(job.id)
            if now is not None and now.is_cancel_requested:
                attempt.halt("cancel")
            if self._ended.is_set():
                attempt.halt("drain")
            attempt.run()
        except Exception as error:  # noqa: BLE001 - a job's error is the job's
            group.leave(job.id, is_alone=isinstance(error, LeftBatchError))
            if not self._waits_for_devices(attempt, error, group):
                self._end_unfinished(attempt, error)
            self._leave(attempt)
            return None
        group.leave(job.id)
        group.health.note_work()
        self._changes.note()
        return self._finisher.submit(self._finish, attempt)

    def _finish(self, attempt: Attempt) -> None:
        """Write the files of a job whose devices are free again."""
        try:
            attempt.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self._end_unfinished(attempt, error)
        finally:
            self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        with self._lock:
            if self._attempts.get(attempt.job.id) is not attempt:
                return  # it is back in the queue, and another thread has begun it again
            del self._attempts[attempt.job.id]
        self._previews.pop(attempt.job.id, None)

    def _waits_for_devices(self, attempt: Attempt, error: Exception, group: DeviceGroup) -> bool:
        """Requeue a job, for any group, if broken devices ended it; returns whether they did."""
        if attempt.has_stepped:
            group.health.note_work()
            return False
        if not isinstance(error, WorkerDiedError):
            return False
        job = attempt.job
        is_last = job.attempts >= self._options.max_attempts
        why = group.health.note_death(is_last=is_last)
        if why is None:
            return False
        _log.error("group %s waits, its devices do not work: %s", group.name, why)
        self._persist(lambda: self._store.requeue(
            job.id, counts_attempt=False, cause="devices_fail", group=None,
            **attempt.fields()))  # fmt: skip
        return True

    def _end_unfinished(self, attempt: Attempt, error: Exception) -> None:
        """Decide what follows an attempt that did not finish, and write it into the job's row."""
        job, fields = attempt.job, attempt.fields()
        if isinstance(error, RunStoppedError) and attempt.reason == "cancel":
            self._persist(lambda: self._store.finish(job.id, "cancelled", **fields))
            return
        is_stopped = isinstance(error, (RunStoppedError, LeftBatchError))
        waits = isinstance(error, (RunLockedError, StoreError, DevicesBusyError))
        if is_stopped or waits or is_disk_full(error) or is_system_exhausted(error):
            if not is_stopped:
                if not isinstance(error, DevicesBusyError):  # which is no problem of the server
                    self._problem = str(error)
                _log.error("%s waits: %s", job.id, error)
                self._draining.wait(_PAUSE)
            cause = attempt.reason or code_of(error)
            self._persist(lambda: self._store.requeue(
                job.id, counts_attempt=False, cause=cause, **fields))  # fmt: skip
            return
        attempts = 1 if attempt.has_advanced else job.attempts
        if attempts < self._options.max_attempts and self._can_repeat(attempt, error):
            _log.warning("%s is tried again (attempt %d failed): %s", job.id, attempts, error)
            fields = attempt.fields(f"an attempt failed: {self._message_of(error)}")
            self._persist(lambda: self._store.requeue(
                job.id, counts_attempt=True, cause=code_of(error), attempts=attempts,
                **fields))  # fmt: skip
            return
        _log.error("%s failed: %s", job.id, error, exc_info=not isinstance(error, EveryframeError))
        data = {"code": code_of(error), "message": self._message_of(error)}
        self._persist(lambda: self._store.finish(job.id, "failed", error=data, **fields))

    def _message_of(self, error: Exception) -> str:
        return self._store.folder.without_place(message_of(error))

    def _can_repeat(self, attempt: Attempt, error: Exception) -> bool:
        """Whether another attempt may succeed; prepares that attempt."""
        if isinstance(error, DistributedOutOfMemoryError):
            self._out_of_memory[attempt.job.id] = error.out_of_memory
            return True
        if isinstance(error, WorkerDiedError):
            return True
        if attempt.has_resumed and isinstance(error, (InputError, CorruptRunError, CannotRunError)):
            # The weights or the device changed, or the run is damaged: all of it is made again.
            self._store.folder.remove_runs(attempt.job.id)
            return True
        return False

    def _persist(self, write: Callable[[], object]) -> None:
        """Write into the store, and repeat it while the store can't be written.

        If the server ends first, the row still says that the job runs, and `recover` requeues it.
        """
        while True:
            try:
                write()
            except NoSuchVideoError as error:
                _log.warning("%s", error)
            except StoreError as error:
                self._log_once(str(error))
                self._problem = str(error)
                if not self._ended.wait(_PAUSE):
                    continue
            return

    def _log_once(self, problem: str) -> None:
        """Log a lasting problem once: the log may lie on the disk that is full."""
        if problem not in self._logged:
            self._logged.add(problem)
            _log.error("%s", problem)
