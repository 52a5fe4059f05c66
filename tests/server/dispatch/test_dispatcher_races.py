"""The dispatcher where another thread acts between two of its statements."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from everyframe.core.errors import StoreError, WorkerDiedError
from everyframe.engine.workers import stop_switch
from everyframe.server.data_folder import DataFolder
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import FakeExecutor
from helpers.server_jobs import Start, add, ended, types

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


def test_a_job_that_is_to_be_cancelled_does_not_go_back_into_the_queue(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt has ended by itself just before, so that there is nothing to stop."""
    executor = FakeExecutor(failures=[(1, DIED)])
    requeue = store.requeue

    def cancelled(id: str, **values: Any) -> Job:  # noqa: A002
        store.request_cancel(id)
        return requeue(id, **values)

    monkeypatch.setattr(store, "requeue", cancelled)
    job = add(store)
    store.retention_seconds = 60.0
    dispatch(executor)
    done = ended(store, job, "cancelled")
    assert done.completed_at is not None
    assert done.expires_at is not None
    assert types(store, job).count("done") == 1
    assert len(executor.jobs) == 1, "it takes no worker"


def test_a_job_that_is_cancelled_in_the_queue_expires_as_others_do(
    store: JobStore, dispatch: Start
) -> None:
    store.retention_seconds = 60.0
    running, waiting = add(store), add(store, 4)
    dispatcher = dispatch(FakeExecutor(pause=60))
    ended(store, running, "in_progress")
    assert dispatcher.cancel(waiting.id).expires_at is not None


def test_jobs_that_recovery_ends_expire_as_others_do(store: JobStore, dispatch: Start) -> None:
    store.retention_seconds = 60.0
    job = add(store)
    store.claim("default")
    store.request_cancel(job.id)
    dispatch(FakeExecutor())
    assert ended(store, job, "cancelled").expires_at is not None


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


@pytest.mark.parametrize("lacking", [errno.EMFILE, errno.ENOMEM])
def test_a_job_waits_while_the_system_has_no_files_or_processes(
    store: JobStore, dispatch: Start, lacking: int
) -> None:
    executor = FakeExecutor(failures=[(2, OSError(lacking, os.strerror(lacking)))])
    job = add(store)
    dispatch(executor, max_attempts=1)
    assert ended(store, job).attempts == 1
    assert len(executor.jobs) == 2


def test_a_group_lives_on_where_no_file_can_be_opened(
    store: JobStore, folder: DataFolder, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where clients hold all connections that the process may have."""
    failures = iter(range(3))

    def scarce(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(failures, None) is not None:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*args, **named)

        return call

    monkeypatch.setattr(stop_switch, "Pipe", scarce(multiprocessing.Pipe))
    monkeypatch.setattr(DataFolder, "saved_run_path", scarce(DataFolder.saved_run_path))
    jobs = [add(store, seed) for seed in range(3)]
    dispatch(FakeExecutor(pause=0.001))
    for job in jobs:
        ended(store, job)
