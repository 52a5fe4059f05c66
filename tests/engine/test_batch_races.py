"""Jobs join a batch, end and die at the same moments: no worker is idle with a job in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.errors import WorkerDiedError
from everyframe.core.events import Events, Note
from everyframe.core.request import Request
from everyframe.engine.workers import warm_workers
from everyframe.engine.workers.shared_worker import SharedWorker
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob
from helpers.fake_worker import FakeWorker

JOB = WorkerJob(Request(prompt="a red circle"), batch="a batch")
READER = "messages of a batch"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The worker processes that were started."""
    made: list[FakeWorker] = []

    def start() -> FakeWorker:
        made.append(FakeWorker())
        return made[-1]

    monkeypatch.setattr(warm_workers, "Worker", start)
    return made


@pytest.fixture
def workers(made: list[FakeWorker]) -> Iterator[WarmWorkers]:
    workers = WarmWorkers(stop_seconds=0.5)
    yield workers
    workers.close()
    for worker in made:
        worker.kill()


def once_before(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str, act: Callable[[], object]
) -> None:
    """Do something at the beginning of the next call of a method."""
    method = getattr(place, name)

    def called(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(place, name, method)
        act()
        return method(*args, **named)

    monkeypatch.setattr(place, name, called)


def ends_alone(
    workers: WarmWorkers, made: list[FakeWorker], events: Events, job: WorkerJob
) -> bool:
    """End the job that is left of a batch; whether its worker was busy until then and no longer.

    It is idle first, and of two without a model one stays.
    """
    was_idle = bool(workers._idle)
    plan = workers.run(replace(JOB, batch=None))
    assert len(made) == 2, "a job alone gets another worker"
    made[0].end_job(job)
    assert list(events) == []
    made[1].end_job()
    assert list(plan) == []
    return not was_idle and [group.workers for group in workers._idle] == [made[:1]]


def test_a_job_that_joins_as_the_last_one_ends_keeps_the_worker(
    workers: WarmWorkers, made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, joined = workers.run(JOB), list[Events]()
    once_before(monkeypatch, WarmWorkers, "_put_back", lambda: joined.append(workers.run(JOB)))
    made[0].end_job(made[0].next_job())
    assert list(first) == []
    assert ends_alone(workers, made, joined[0], made[0].next_job())


def test_two_jobs_that_begin_a_batch_at_once_both_count(
    workers: WarmWorkers, made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = list[Events]()
    once_before(monkeypatch, SharedWorker, "give", lambda: joined.append(workers.run(JOB)))
    first = workers.run(JOB)
    assert len(made) == 1, "they share a worker"
    second_job, first_job = made[0].next_job(), made[0].next_job()
    made[0].end_job(first_job)
    assert list(first) == []
    assert ends_alone(workers, made, joined[0], second_job)


def test_two_threads_that_begin_a_batch_at_once_share_a_worker(
    workers: WarmWorkers, made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, both = WarmWorkers._take, threading.Barrier(2)

    def slowly(*args: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # the other one is here too, if nothing holds it
        return taken(*args)

    monkeypatch.setattr(WarmWorkers, "_take", slowly)
    runs: list[Events] = []
    threads = [threading.Thread(target=lambda: runs.append(workers.run(JOB))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    for _ in runs:
        made[0].end_job(made[0].next_job())
    assert [list(events) for events in runs] == [[], []]


def test_a_job_that_could_not_join_a_dead_worker_begins_on_another(
    workers: WarmWorkers, made: list[FakeWorker]
) -> None:
    first = workers.run(JOB)
    made[0].next_job()
    made[0].die()
    second = workers.run(JOB)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        list(first)
    made[1].end_job(made[1].next_job())
    assert list(second) == []
    assert len(workers._idle) == 1


def test_a_connection_is_not_closed_under_the_thread_that_writes() -> None:
    """Its number could be that of another connection by then."""
    worker = FakeWorker()
    shared = SharedWorker(worker, "a batch")
    slow, other = shared.give(JOB), shared.give(JOB)
    begun, closed, seen = threading.Event(), threading.Event(), []
    write = slow._writer.send_bytes

    def send(part: bytes) -> None:
        begun.set()
        seen.append(closed.wait(0.3))
        write(part)

    def close() -> None:
        slow.close()
        closed.set()

    slow._writer.send_bytes = send  # type: ignore[method-assign,assignment]
    jobs = [worker.next_job() for _ in range(2)]
    worker.say("event", Note("to one"), jobs[0])
    assert begun.wait(10)
    threading.Thread(target=close).start()
    assert closed.wait(10)
    assert seen == [False]
    worker.say("event", Note("to the other"), jobs[1])
    assert other.receive() == ("event", Note("to the other"))
    worker.kill()


def test_a_connection_is_not_closed_under_the_thread_that_reads(
    workers: WarmWorkers, made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers.run(JOB), workers.run(JOB)
    (worker,) = made
    jobs = [worker.next_job() for _ in range(2)]
    worker.say("event", Note("begun"), jobs[0])
    assert next(iter(first)) == Note("begun")
    readers: list[bool] = []
    kill = worker.kill

    def noted() -> int:
        readers.append(any(each.name == READER for each in threading.enumerate()))
        return kill()

    def end_late() -> None:
        worker._process.kill()
        threading.Timer(0.3, worker.theirs.close).start()

    monkeypatch.setattr(worker, "end_now", end_late)
    monkeypatch.setattr(worker, "kill", noted)
    first.close()  # it does not stop in time, which ends no other
    assert not readers
    second.close()
    assert readers == [False]


def test_a_message_that_can_not_be_read_ends_the_worker(
    workers: WarmWorkers, made: list[FakeWorker]
) -> None:
    events = [workers.run(JOB) for _ in range(2)]
    made[0].theirs.send_bytes(b"{")
    for each in events:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            list(each)
