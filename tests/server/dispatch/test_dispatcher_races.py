"""The dispatcher where another thread acts between two of its statements."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from everyframe.core.errors import StoreError, WorkerDiedError
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import FakeExecutor
from helpers.server_jobs import Start, add, ended

DIED = WorkerDiedError("the worker died of SIGKILL")


class Batched(FakeExecutor):
    """An executor for several jobs at a time, so that its group has several threads."""

    has_batches = True


def until(is_so: Callable[[], bool]) -> None:
    latest = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < latest
        time.sleep(0.005)


def test_a_job_that_another_thread_begins_again_at_once_can_be_cancelled(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back in the queue before the thread of its last attempt has let it go."""
    executor = Batched(failures=[(1, DIED)])
    requeue, begun = store.requeue, threading.Event()

    def slowly(*args: Any, **values: Any) -> Job:
        executor.pause = 60
        job = requeue(*args, **values)
        until(lambda: len(executor.jobs) == 2)
        begun.set()
        return job

    monkeypatch.setattr(store, "requeue", slowly)
    job = add(store)
    dispatcher = dispatch(executor, max_batch=2)
    assert begun.wait(20)
    assert dispatcher.cancel(job.id, wait=20).status == "cancelled"
    executor.pause = 0
    for seed in range(4):
        ended(store, add(store, seed))


def test_a_job_that_is_begun_runs_even_if_the_queue_cannot_be_read_then(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(job: Job) -> bool:
        monkeypatch.undo()
        raise StoreError("unable to open database file")

    monkeypatch.setattr(store, "has_older", unreadable)
    job = add(store)
    dispatch(FakeExecutor())
    ended(store, job)
