"""A worker may die at any byte: its jobs end as those of a dead worker, which are resumed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from everyframe.core.errors import WorkerDiedError
from everyframe.core.events import Planned, Step
from everyframe.core.request import Request
from everyframe.engine.workers import warm_workers
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.shared_worker import SharedWorker
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import Worker, WorkerJob, receive
from helpers.fake_engine import plan_of
from helpers.fake_worker import FakeWorker

JOB = WorkerJob(Request(prompt="a red circle"))


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    made = FakeWorker()
    yield made
    made.kill()


def run_on(worker: FakeWorker, mine: Worker) -> None:
    @contextmanager
    def given(job: WorkerJob) -> Iterator[Sequence[Worker]]:
        mine.job = job
        yield [mine]

    list(run_in_workers(JOB, Path.cwd(), start=given))


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 5, 50])
def test_a_worker_that_dies_in_mid_message_is_dead(worker: FakeWorker, num_bytes: int) -> None:
    worker.die_in_mid_message(num_bytes)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        run_on(worker, worker)


def test_a_worker_that_dies_before_it_reads_its_job_is_dead(worker: FakeWorker) -> None:
    """The system then resets the connection."""
    worker.give(JOB)
    worker.die()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        run_on(worker, worker)


@pytest.mark.parametrize("num_bytes", [0, 3, 50])
def test_a_batch_whose_worker_dies_in_mid_message_is_reported(
    worker: FakeWorker, num_bytes: int
) -> None:
    shared = SharedWorker(worker, "a batch")
    mine = [shared.give(JOB) for _ in range(2)]
    for _ in mine:
        worker.next_job()
    worker.die_in_mid_message(num_bytes)
    for each in mine:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            run_on(worker, each)
    assert not shared.is_fit


class Fleet:
    """Fake workers in place of the processes of `WarmWorkers`; `script` is called with each job."""

    def __init__(self, script: Callable[[FakeWorker, WorkerJob], None]) -> None:
        self.workers: list[FakeWorker] = []
        self._script = script

    def __call__(self) -> FakeWorker:
        worker = FakeWorker()
        self.workers.append(worker)
        threading.Thread(target=self._serve, args=(worker,), daemon=True).start()
        return worker

    def _serve(self, worker: FakeWorker) -> None:
        with suppress(EOFError, OSError):
            while True:
                name, value = receive(worker.theirs)
                if name == "job":
                    self._script(worker, value)


def hang_up(worker: FakeWorker) -> None:
    """Die in another thread than that of the test, which alone closes the connection."""
    worker._process.kill()
    worker._process.wait()
    with socket.socket(fileno=os.dup(worker.theirs.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def test_a_plan_whose_worker_dies_is_made_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Request(prompt="a red circle"))

    def script(worker: FakeWorker, job: WorkerJob) -> None:
        if worker is fleet.workers[0]:
            hang_up(worker)
            return
        worker.say("event", Planned(plan))
        worker.end_job()

    fleet = Fleet(script)
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    workers = WarmWorkers()
    assert workers.plan(Request(prompt="a red circle")).model == plan.model
    assert len(fleet.workers) == 2
    workers.close()


def test_a_plan_that_kills_its_workers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(lambda worker, job: hang_up(worker))
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        WarmWorkers().plan(Request(prompt="a red circle"))
    assert len(fleet.workers) == 2


def test_of_workers_that_keep_no_model_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 450 MB. A plan leaves the one that keeps a model to the job that comes next."""
    plan = plan_of(Request(prompt="a red circle"))
    together = threading.Barrier(3)

    def script(worker: FakeWorker, job: WorkerJob) -> None:
        planned.append(worker)
        if 1 < len(planned) < 5:
            together.wait(60)
        worker.say("event", Planned(plan))
        kept = [("a model", 1, 0.0, "cpu")] if worker is fleet.workers[0] else []
        worker.say("end", {"waits": True, "warm": kept})

    planned: list[FakeWorker] = []
    fleet = Fleet(script)
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    workers, request = WarmWorkers(), Request(prompt="a red circle")
    list(workers.run(JOB))
    plans = [threading.Thread(target=workers.plan, args=(request,), daemon=True) for _ in range(3)]
    for each in plans:
        each.start()
    for each in plans:
        each.join(60)
    first, *others = fleet.workers
    assert len(others) == 2
    assert first.is_alive()
    (spare,) = (worker for worker in others if worker.is_alive())
    workers.plan(request)
    assert planned[-1] is spare
    workers.close()


def test_a_job_that_does_not_stop_in_time_ends_no_other_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step takes longer than a stop may; the worker is free once it has ended after all."""
    plan = plan_of(Request(prompt="a red circle"))
    jobs: list[WorkerJob] = []

    def script(worker: FakeWorker, job: WorkerJob) -> None:
        jobs.append(job)
        worker.say("event", Planned(plan), job)

    fleet = Fleet(script)
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    workers = WarmWorkers(stop_seconds=0.05)
    batched = replace(JOB, batch="a batch")
    slow, other = workers.run(batched), workers.run(batched)
    assert isinstance(next(slow), Planned)
    assert isinstance(next(other), Planned)
    slow.close()
    (worker,) = fleet.workers
    worker.say("event", Step("denoise", 1, 4, 0, 1.0), jobs[0])  # which nobody reads
    worker.say("event", Step("denoise", 1, 4, 0, 1.0), jobs[1])
    assert isinstance(next(other), Step)
    worker.end_job(jobs[0])
    worker.end_job(jobs[1])
    assert list(other) == []
    assert worker.is_alive()
    assert [group.workers for group in workers._idle] == [[worker]]
    workers.close()


def test_a_worker_whose_last_job_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Request(prompt="a red circle"))
    fleet = Fleet(lambda worker, job: worker.say("event", Planned(plan), job))
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    workers = WarmWorkers(stop_seconds=0.05)
    batched = replace(JOB, batch="a batch")
    both = [workers.run(batched) for _ in range(2)]
    for events in both:
        assert isinstance(next(events), Planned)
    for events in both:
        events.close()
    (worker,) = fleet.workers
    assert worker._process.wait(20) != 0
    assert not workers._idle
    workers.close()
