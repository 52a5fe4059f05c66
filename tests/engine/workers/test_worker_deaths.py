"""A worker may die at any byte: its jobs end as those of a dead worker, which are resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from everyframe.core.errors import WorkerDiedError
from everyframe.core.events import Planned
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


def test_a_plan_whose_worker_dies_is_made_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Request(prompt="a red circle"))

    def script(worker: FakeWorker, job: WorkerJob) -> None:
        if worker is fleet.workers[0]:
            worker.die()
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
    fleet = Fleet(lambda worker, job: worker.die())
    monkeypatch.setattr(warm_workers, "Worker", fleet)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        WarmWorkers().plan(Request(prompt="a red circle"))
    assert len(fleet.workers) == 2
