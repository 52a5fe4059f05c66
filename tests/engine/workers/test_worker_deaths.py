"""A worker may die at any byte: its jobs end as those of a dead worker, which are resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from everyframe.core.errors import WorkerDiedError
from everyframe.core.request import Request
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.shared_worker import SharedWorker
from everyframe.engine.workers.worker_process import Worker, WorkerJob
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
