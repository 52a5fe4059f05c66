"""Worker processes that stay warm: an executor whose workers take one job after the other.

A worker has imported torch and keeps what its engine keeps (`warm_state.py`): loaded components,
specs, prompt encodings. Jobs for several ranks have a group of workers of their own. A worker dies
alone: its job ends with `WorkerDiedError`, the next job gets a new one. Imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from everyframe.core.errors import EveryframeError, NotSerializableError, WorkerDiedError
from everyframe.core.events import Events, Planned
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers.executor import WarmModel, feasible_plan, warm_models, with_own_ranks
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.shared_worker import BatchedWorker, SharedWorker
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import (
    Worker,
    WorkerJob,
    check_memory_for_ranks,
)
from everyframe.planning.input_checks import check_input_files

#: Prefixes of environment variables that a worker reads at start; a change needs a new worker.
_READ_AT_START = ("EVERYFRAME_", "HF_", "OMP_", "MKL_", "CUDA_", "TMPDIR")
#: Seconds that a dead worker's last messages may take.
_READER_SECONDS = 5.0


class WarmWorkers:
    """An executor whose workers stay for `keep_warm` seconds after their last job.

    A job that is closed before its end stops at its next step, within `stop_seconds`; then, or if
    it has several ranks, its workers are killed. Of idle workers that keep no model, one stays.
    """

    has_batches = True

    def __init__(self, keep_warm: float = 600.0, stop_seconds: float = 10.0) -> None:
        self._keep_warm, self._stop_seconds = keep_warm, stop_seconds
        self._lock, self._beginning = threading.Lock(), threading.RLock()
        self._idle: list[_Group] = []
        # Weak: a job whose events were never read ends with its generator.
        self._busy: WeakSet[_Group] = WeakSet()
        self._free: dict[str, int] = {}
        self._is_closed = False
        self._timer: threading.Timer | None = None

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        """Run a job in workers that may have run others; see `Executor.run`."""
        if job.request is not None and place is None:
            check_input_files(job.request)
        job = replace(with_own_ranks(job), stays=True)
        return self._note_memory(run_in_workers(job, place or Path.cwd(), stop, self._workers))

    def plan(self, request: Request) -> Plan:
        """Plan a request in a worker that is idle; see `Executor.plan`.

        Memory that the running job and other workers have counts as free, as the request will have
        it when its turn comes. If the worker dies, another one plans.
        """
        with self._lock:
            free = dict(self._free)
        job = WorkerJob(request, plans=True, stays=True, free_memory=free)
        try:
            return self._plan(job)
        except WorkerDiedError:
            if self._is_closed:
                raise
            return self._plan(job)  # whatever it died of, nothing was lost with it

    def _plan(self, job: WorkerJob) -> Plan:
        with closing(run_in_workers(job, Path.cwd(), start=self._workers)) as events:
            plan = feasible_plan(events)
            for _ in events:
                raise AssertionError("a plan is the only event")
            return plan

    def start(self, num_ranks: int = 1) -> None:
        """Start the workers of a job to come, unless there are some that are idle."""
        with self._lock:
            if not any(group.fits(num_ranks) for group in self._idle):
                self._idle.append(_Group(num_ranks))

    def describe(self) -> list[WarmModel]:
        """The models that are loaded, or that ran in the last jobs."""
        with self._lock:
            groups = [*((each, False) for each in self._idle), *((g, True) for g in self._busy)]
        return [model for group, is_busy in groups for model in group.models(is_busy=is_busy)]

    def close(self) -> None:
        """Kill all workers. The runs of jobs that are under way can be resumed."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = [*self._busy]
        for group in idle:
            group.kill()
        for group in busy:  # the consumer of its events gets an error, and ends it
            group.end_now()

    @contextmanager
    def _workers(self, job: WorkerJob) -> Iterator[Sequence[Worker]]:
        """Context: workers for the job, which go back to the idle ones if they are fit for more."""
        if job.batch is not None:
            with self._worker_of_batch(job, job.batch) as worker:
                yield [worker]
            return
        group = self._give(job)
        try:
            with self._closing_named():
                yield group.workers
        except WorkerDiedError:
            group.kill()
            raise
        finally:
            self._put_back(group, is_fit=group.settles(self._stop_seconds))

    @contextmanager
    def _worker_of_batch(self, job: WorkerJob, batch: str) -> Iterator[Worker]:
        """Context: the worker that computes this batch, or one that begins it."""
        with self._beginning:  # two that begin the same batch at once would have a worker each
            group, worker = self._join(job, batch)
        try:
            with self._closing_named():
                yield worker
        finally:
            is_fit = worker.stop(self._stop_seconds)
            worker.close()
            self._put_back(group, is_fit=is_fit)

    @contextmanager
    def _closing_named(self) -> Iterator[None]:
        """Context: a death of workers that were closed says so."""
        try:
            yield
        except WorkerDiedError as error:
            if self._is_closed:
                raise WorkerDiedError(f"its workers were closed ({error})") from error
            raise

    def _join(self, job: WorkerJob, batch: str) -> tuple[_Group, BatchedWorker]:
        """Workers that have the job beside others of its batch, or alone."""
        with self._lock:
            for group in self._busy:
                shared = group.shared
                if shared is not None and shared.batch == batch and shared.is_fit:
                    with suppress(OSError):  # it died just now
                        worker = shared.give(job)
                        group.num_jobs += 1
                        return group, worker
        group = self._take(job)
        assert group.shared is not None, "of a batch"
        try:
            return group, group.shared.give(job)
        except OSError:  # it died while it was idle
            self._put_back(group, is_fit=False)
            return self._join(job, batch)

    def _put_back(self, group: _Group, *, is_fit: bool) -> None:
        """Put workers to the idle ones once no job has them; end them at once if they are unfit.

        That no job has them and that none can join is one moment. A job of a batch that does not
        stop in time ends no other one: it stops at its next step, as long as others are there.
        """
        with self._lock:
            group.num_jobs -= 1
            if group.shared is not None:
                has_stopped = is_fit and not group.shared.is_at_work
                is_fit = group.shared.is_fit and (has_stopped or group.num_jobs > 0)
            if group not in self._busy or (is_fit and group.num_jobs):
                return
            self._busy.discard(group)
            is_spare = group.is_spare() and any(each.is_spare() for each in self._idle)
            keeps = is_fit and not self._is_closed and not is_spare
            if keeps:
                group.shared = None
                group.since = time.time()
                self._idle.append(group)
        if keeps:
            self._reap_later()
        else:
            group.kill()

    def _give(self, job: WorkerJob) -> _Group:
        """Workers that have the job."""
        group = self._take(job)
        try:
            group.give(job)
        except OSError:  # it died while it was idle
            self._put_back(group, is_fit=False)
            return self._give(job)
        except NotSerializableError:
            self._put_back(group, is_fit=True)
            raise
        return group

    def _take(self, job: WorkerJob) -> _Group:
        """The fittest idle group, or a new one. The others give their memory to it.

        A plan leaves those that keep a model to the job that comes next, if there is another.
        """
        with self._lock:
            if self._is_closed:
                raise EveryframeError("these workers are closed; make new ones")
            gone = [group for group in self._idle if not group.is_alive()]
            fit = [g for g in self._idle if g not in gone and g.fits(len(job.weights))]
            name = None if job.request is None else job.request.model
            if job.plans:
                fit = [group for group in fit if group.is_spare()] or fit
            best = max(fit, key=lambda group: group.fitness(name), default=None)
            group = best or _Group(len(job.weights))
            self._idle = [each for each in self._idle if each not in (*gone, group)]
            others = [] if job.plans else [g for g in self._idle if g.is_in_the_way(job)]
            self._idle = [each for each in self._idle if each not in others]
            group.begin(job)
            self._busy.add(group)
        for each in (*gone, *others):
            each.kill()
        return group

    def _reap_later(self) -> None:
        """Wait for the end of the longest idle time; one thread waits, however many jobs end."""
        with self._lock:
            if self._timer is not None or not self._idle or self._is_closed:
                return
            left = min(group.since for group in self._idle) + self._keep_warm - time.time()
            self._timer = threading.Timer(max(left, 0.0), self._reap)
            self._timer.daemon = True
            self._timer.start()

    def _reap(self) -> None:
        """End the groups that were idle for long enough."""
        with self._lock:
            self._timer = None
            until = time.time() - self._keep_warm
            old = [group for group in self._idle if group.since <= until]
            self._idle = [group for group in self._idle if group not in old]
        for group in old:
            group.kill()
        self._reap_later()

    def _note_memory(self, events: Events) -> Events:
        """The events; the free memory that the plan found is noted."""
        with closing(events):
            for event in events:
                if isinstance(event, Planned):
                    device = event.plan.device
                    with self._lock:
                        self._free[device.torch_name] = device.free_memory
                yield event


class _Group:
    """The workers of the ranks of one job at a time, or one worker of a batch of jobs.

    Attributes:
        since: when its last job ended.
        shared: the jobs of its batch; None for a job alone.
        num_jobs: number of jobs whose events are still consumed.
    """

    def __init__(self, num_ranks: int) -> None:
        check_memory_for_ranks(num_ranks)
        self.workers = [Worker() for _ in range(num_ranks)]
        self.since = time.time()
        self.shared: SharedWorker | None = None
        self.num_jobs = 0
        self._environment = _environment()

    def fits(self, num_ranks: int) -> bool:
        """Whether a job of so many ranks can have these workers."""
        return len(self.workers) == num_ranks and self._environment == _environment()

    def is_alive(self) -> bool:
        """Whether all workers live."""
        return all(worker.is_alive() for worker in self.workers)

    def fitness(self, model: str | None) -> tuple[bool, int, float]:
        """How fit they are for a model; the fittest is the largest."""
        warm = [each for worker in self.workers for each in worker.warm]
        size = sum(size for _, size, *_ in warm)
        return any(name == model for name, *_ in warm), size, self.since

    def is_spare(self) -> bool:
        """Whether it is one worker that keeps no model."""
        return len(self.workers) == 1 and not self.workers[0].warm

    def is_in_the_way(self, job: WorkerJob) -> bool:
        """Whether they keep something loaded where the job may compute."""
        taken = {device for worker in self.workers for *_, device in worker.warm}
        wanted = _devices(job)
        return bool(taken) and (wanted is None or not taken.isdisjoint(wanted))

    def models(self, *, is_busy: bool) -> list[WarmModel]:
        """The models that they keep loaded."""
        loaded = [each for worker in self.workers for each in worker.warm]
        return warm_models(loaded, is_busy=is_busy)

    def begin(self, job: WorkerJob) -> None:
        """Note the first job, which others may join if it is of a batch."""
        self.num_jobs = 1
        if job.batch is not None:
            self.shared = SharedWorker(self.workers[0], job.batch)

    def give(self, job: WorkerJob) -> None:
        """Give each worker its rank of the job; `OSError` if one is gone."""
        for rank, worker in enumerate(self.workers):
            worker.give(replace(job, rank=rank))

    def end_now(self) -> None:
        """Kill all workers; the consumer of their events gets an error."""
        for worker in self.workers:
            worker.end_now()

    def settles(self, seconds: float) -> bool:
        """Stop the job if it still runs; whether all workers wait for another one in time."""
        if len(self.workers) > 1:
            return all(worker.waits and worker.has_ended for worker in self.workers)
        (worker,) = self.workers
        return worker.waits or worker.stop(seconds)

    def kill(self) -> None:
        """Kill all workers."""
        self.end_now()
        if self.shared is not None and not self.shared.is_read_to_its_end(_READER_SECONDS):
            return  # the reading thread closes the connection with the last reference
        for worker in self.workers:
            worker.kill()


def _devices(job: WorkerJob) -> set[str] | None:
    """The devices of a job, by torch's names; None if its plan chooses them."""
    request = job.request
    if request is None:
        return None
    named = request.devices or (request.device,)
    is_chosen = any(name != "cpu" and ":" not in name for name in named)
    return None if is_chosen else {*named}


def _environment() -> Mapping[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_READ_AT_START)}
