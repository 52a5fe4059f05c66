"""The dispatcher after faults: deaths, bugs, full disks, a queue that can't be written."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import (
    CorruptRunError,
    DevicesBusyError,
    DistributedOutOfMemoryError,
    InputError,
    NumericsError,
    OutOfMemoryInfo,
    StoreError,
    WorkerDiedError,
)
from everyframe.core.events import Events, Note, RunSaved
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.server.data_folder import DataFolder
from everyframe.server.dispatch import attempt as attempts
from everyframe.server.dispatch import dispatcher
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from helpers.fake_executor import NUM_STEPS, FakeExecutor, frames_of
from helpers.server_jobs import Start, add, ended, frames_in, types

DIED = WorkerDiedError("the worker died of SIGSEGV; resume it: everyframe resume 2026")


def test_a_worker_that_dies_is_resumed_at_its_step(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    executor = FakeExecutor(failures=[(2, DIED)])
    job = add(store)
    dispatch(executor)
    done = ended(store, job)
    assert executor.steps == [(3, step) for step in range(1, NUM_STEPS + 1)], "no step twice"
    assert executor.jobs[1].run is not None
    assert done.report["resumed_from_step"] == 2
    assert done.report["warnings"] == ["an attempt failed: the worker died of SIGSEGV"]
    assert "resumed" in types(store, job)
    assert np.abs(frames_in(folder, done).astype(int) - frames_of(3)).max() < 12


def test_notes_of_a_run_tell_clients_no_path(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    class NotingExecutor(FakeExecutor):
        def run(self, job: WorkerJob, *given: Any) -> Events:
            for event in super().run(job, *given):
                yield event
                if isinstance(event, RunSaved):
                    yield Note(f"the run state can't be written to {event.path}; the run goes on")

    job = add(store)
    dispatch(NotingExecutor())
    (note,) = ended(store, job).report["warnings"]
    assert note.startswith(f"the run state can't be written to DATA/runs/{job.id}/")
    events = store.events(video=job.id)
    assert [event.data["text"] for event in events if event.type == "note"] == [note]
    (planned,) = [event.data for event in events if event.type == "planned"]
    assert planned["model"] == job.model, "which may be a folder in the plan"


def test_attempts_without_a_step_between_are_limited(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    job, other = add(store), add(store, 4)
    dispatch(FakeExecutor(failures=[(2, DIED)] * 3))
    failed = ended(store, job, "failed", seconds=120)  # a process with torch asks the devices
    assert failed.error == {"code": "worker_died", "message": "the worker died of SIGSEGV"}
    assert failed.attempts == 3
    assert list(all_runs(folder.runs_of(job.id))), "its run stays for a retry"
    ended(store, other)


def test_attempts_that_advance_are_not_limited(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor(failures=[(step, DIED) for step in range(1, NUM_STEPS)], pause=0.01)
    job = add(store)
    dispatch(executor, max_attempts=2)
    done = ended(store, job)
    assert len(executor.jobs) == NUM_STEPS > done.attempts


def test_steps_that_are_saved_count_and_not_those_that_are_seen(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt dies where the last one did, and is resumed one step further."""
    monkeypatch.setattr(attempts, "_PAUSE", 0.0)
    executor = FakeExecutor(failures=[(4, DIED)] * 4, most_saved=[1, 2, 3, 4])
    job = add(store)
    dispatch(executor, max_attempts=2)
    done = ended(store, job)
    assert done.report["resumed_from_step"] == 4
    assert len(executor.jobs) == 5


@pytest.mark.parametrize("saved", [0, 1])
def test_a_job_that_kills_its_workers_ends_as_failed(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    """Also one that is seen to come further each time, of which nothing more is saved."""
    monkeypatch.setattr(attempts, "_PAUSE", 0.0)
    executor = FakeExecutor(
        failures=[(step, DIED) for step in range(1, NUM_STEPS)] * 2, most_saved=[saved] * 9
    )
    job = add(store)
    dispatch(executor, max_attempts=3)
    failed = ended(store, job, "failed")
    assert failed.attempts == len(executor.jobs) == 3


def test_a_run_that_is_begun_again_and_again_ends_as_failed(
    store: JobStore, dispatch: Start
) -> None:
    """Each time that it is resumed it is found damaged, and what is made anew comes no further."""
    executor = FakeExecutor(failures=[(2, DIED), (2, CorruptRunError("changed"))] * 4)
    job = add(store)
    dispatch(executor)
    assert ended(store, job, "failed").attempts == 3


def test_a_failed_job_is_retried_from_its_run(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor(failures=[(3, NumericsError("not finite in step 4"))])
    job = add(store)
    dispatch(executor)
    failed = ended(store, job, "failed")
    assert failed.error == {"code": "numerics", "message": "not finite in step 4"}
    assert store.retry(job.id).status == "queued"
    assert ended(store, job).error is None
    assert executor.steps == [(3, step) for step in range(1, NUM_STEPS + 1)]
    with pytest.raises(InputError, match="only a failed or cancelled video"):
        store.retry(job.id)
    with pytest.raises(LookupError):
        store.retry("video_" + "0" * 32)


def test_a_run_that_cannot_be_resumed_is_begun_again(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor(failures=[(2, DIED), (2, CorruptRunError("state.json was changed"))])
    job = add(store)
    dispatch(executor)
    done = ended(store, job)
    assert [each.run is None for each in executor.jobs] == [True, False, True]
    assert "an attempt failed: state.json was changed" in done.report["warnings"]


def test_wrong_input_fails_at_once(store: JobStore, dispatch: Start) -> None:
    executor = FakeExecutor()
    job = add(store, request={"prompt": "bad"})
    dispatch(executor)
    assert ended(store, job, "failed").error == {
        "code": "input", "message": "prompt must be good",
    }  # fmt: skip
    assert len(executor.jobs) == 1


def test_a_bug_is_one_failed_job(store: JobStore, dispatch: Start) -> None:
    job, other = add(store), add(store, 4)
    dispatch(FakeExecutor(failures=[(1, RuntimeError("oops"))]))
    assert ended(store, job, "failed").error == {"code": "internal", "message": "oops"}
    ended(store, other)


def test_out_of_memory_of_ranks_is_queued_again_with_less(store: JobStore, dispatch: Start) -> None:
    out_of_memory = OutOfMemoryInfo("denoise", 2, ("denoiser",), "in step 2", "8 GB asked", 1)
    error = DistributedOutOfMemoryError("memory ran out on rank 1", out_of_memory)
    executor = FakeExecutor(failures=[(2, error)])
    job = add(store)
    dispatch(executor)
    ended(store, job)
    assert executor.jobs[1].run is not None
    assert executor.jobs[1].out_of_memory == out_of_memory


def test_a_full_disk_makes_jobs_wait(store: JobStore, dispatch: Start) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    executor = FakeExecutor(failures=[(2, full)])
    job = add(store)
    dispatch(executor, max_attempts=1)
    done = ended(store, job)
    assert done.attempts == 1
    assert executor.steps == [(3, step) for step in range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize("steps", [0, 2])
def test_devices_in_use_by_others_make_jobs_wait_with_their_steps(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """However often: neither fails a job nor begins one again that has a run."""
    monkeypatch.setattr(dispatcher, "_PAUSE", 0.01)
    busy = DevicesBusyError("no 4 free GPUs within 60 s")
    executor = FakeExecutor(failures=[(2, busy), *[(steps, busy)] * 4])
    job = add(store)
    found = dispatch(executor, max_attempts=1)
    done = ended(store, job)
    assert done.attempts == 1
    assert executor.steps == [(3, step) for step in range(1, NUM_STEPS + 1)], "no step twice"
    assert all(each.run is not None for each in executor.jobs[1:])
    assert found.problem is None


def test_no_job_begins_on_a_disk_without_room(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataFolder, "free_bytes", lambda self: 2**20)
    job = add(store)
    dispatcher = dispatch(FakeExecutor(), min_free_bytes=2**28)
    while dispatcher.problem is None:
        time.sleep(0.01)
    assert dispatcher.problem == (
        "the disk of the data folder has 1 MiB left; jobs wait until there are 256 MiB"
    )
    now = store.get(job.id)
    assert now is not None
    assert now.status == "queued"
    monkeypatch.undo()
    ended(store, job)
    assert dispatcher.problem is None


def test_a_queue_that_cannot_be_written_loses_nothing(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add(store)
    broken = threading.Event()
    update, requeue = store.update, store.requeue

    def failing(*args: Any, **values: Any) -> Job:
        if values.get("phase") == "denoise" and not broken.is_set():
            broken.set()
            threading.Timer(0.3, monkeypatch.undo).start()
            raise StoreError("the disk is full")
        return update(*args, **values)

    def unwritable(*args: Any, **values: Any) -> Job:
        raise StoreError("the disk is full")

    monkeypatch.setattr(store, "update", failing)
    monkeypatch.setattr(store, "requeue", unwritable)
    dispatcher = dispatch(FakeExecutor())
    assert broken.wait(10)
    while dispatcher.problem != "the disk is full":
        time.sleep(0.01)
    assert requeue
    ended(store, job)


def test_a_trouble_that_lasts_is_logged_once(
    store: JobStore, dispatch: Start, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Threads see several in turns."""
    tries = {"claim": 0, "write": 0}

    def fail(what: str) -> None:
        tries[what] += 1
        raise StoreError(f"{what}: the disk is full")

    monkeypatch.setattr(dispatcher, "_PAUSE", 0.01)
    monkeypatch.setattr(store, "claim", lambda *_: fail("claim"))
    add(store)
    running = dispatch(FakeExecutor())
    writer = threading.Thread(target=running._persist, args=(lambda: fail("write"),))
    writer.start()
    until = time.monotonic() + 10
    while min(tries.values()) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    running.drain()
    writer.join()
    assert min(tries.values()) >= 5
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("write: the disk is full") == 1
    assert lines.count("no job begins: claim: the disk is full") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_video_whose_files_are_there_is_not_made_again(
    store: JobStore, folder: DataFolder, dispatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies after the rename, before the row."""
    job = add(store)
    died = threading.Event()

    def dies(*args: Any, **values: Any) -> Job:
        died.set()
        raise SystemExit

    monkeypatch.setattr(store, "finish", dies)
    dispatch(executor := FakeExecutor())
    assert died.wait(20)
    monkeypatch.undo()
    now = store.get(job.id)
    assert now is not None
    assert now.status == "in_progress"
    assert store.recover() == []
    done = ended(store, job)
    assert done.report["checks"]["num_frames"] == 4
    assert frames_in(folder, done).shape == (4, 64, 64, 3)
    assert len(executor.jobs) == 1


def test_two_workers_of_one_run_never_meet(
    store: JobStore, folder: DataFolder, dispatch: Start
) -> None:
    """The workers of a server that died may live for a second; the next attempt waits."""
    executor = FakeExecutor(failures=[(2, DIED)])
    job = add(store)
    dispatch(executor, max_attempts=1)
    ended(store, job, "failed")
    (run,) = all_runs(folder.runs_of(job.id))
    lock = RunFolder(run.path).lock()
    threading.Timer(0.5, lock.release).start()
    store.retry(job.id)
    began = time.monotonic()
    ended(store, job)
    assert time.monotonic() - began > 0.4
