"""A worker that has several jobs of a batch: events, errors, stops and deaths are of each job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import InputError, WorkerDiedError
from everyframe.core.events import Event, FramesDecoded, Planned, RunSaved, Step, VideoDone
from everyframe.core.plan import BatchPlan
from everyframe.core.request import Request
from everyframe.engine.workers import worker
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob, receive_raw
from helpers.fake_engine import plan_of

GIVEN = {"prompt": "a red circle", "num_frames": 4, "height": 32, "width": 32}


@pytest.fixture(scope="module")
def workers() -> Iterator[WarmWorkers]:
    made = WarmWorkers()
    yield made
    made.close()


def job_of(seed: int, **more: Any) -> WorkerJob:
    return WorkerJob(Request(**{**GIVEN, "seed": seed, **more}), as_uint8=True, batch="a batch")


def processes(workers: WarmWorkers) -> set[int]:
    return {group.workers[0].process_id for group in (*workers._busy, *workers._idle)}


class Listener(threading.Thread):
    """Reads the events of a job; ``look(event)`` is called with each."""

    def __init__(
        self, workers: WarmWorkers, job: WorkerJob, look: Callable[[Event], object] = repr
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.error: Exception | None = None
        self._workers, self._job, self._look = workers, job, look
        self.start()

    def run(self) -> None:
        try:
            for event in self._workers.run(self._job):
                self.events.append(event)
                self._look(event)
        except Exception as error:
            self.error = error

    def frames(self) -> np.ndarray[Any, Any]:
        self.join(120)
        assert self.error is None, self.error
        return np.concatenate([e.frames for e in self.events if isinstance(e, FramesDecoded)])


def expected(seed: int) -> np.ndarray[Any, Any]:
    return everyframe.generate(**GIVEN, seed=seed, run_dir="off").frames


def test_jobs_of_a_batch_share_a_process(workers: WarmWorkers) -> None:
    listeners = [Listener(workers, job_of(seed)) for seed in range(3)]
    wrong = Listener(workers, job_of(3, height=33))
    for seed, listener in enumerate(listeners):
        assert np.array_equal(listener.frames(), expected(seed))
    wrong.join(120)
    assert isinstance(wrong.error, InputError)
    assert len(processes(workers)) == 1
    # The worker takes jobs alone again.
    alone = Listener(workers, replace(job_of(1), batch=None))
    assert np.array_equal(alone.frames(), expected(1))
    assert len(processes(workers)) == 1
    assert workers.describe()


class SilentInbox(worker._Inbox):
    """An inbox that nobody sends to."""

    def _read(self) -> None: ...


@pytest.mark.parametrize("room", [1, 2])
def test_a_job_without_room_waits_in_the_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int
) -> None:
    plan = replace(plan_of(Request(**GIVEN)), batch=BatchPlan(room, "measured"))
    events = [Planned(plan), Step("denoise", 1, 1, 0, 0.0), VideoDone(0, 4, {})]
    monkeypatch.setattr(worker, "_events", lambda *_: (event for event in events))
    monkeypatch.setattr(worker, "ModuleWatch", Mock())  # which would stay in this process
    ours, theirs = Pipe()
    inbox, process = SilentInbox(theirs), worker._ProcessState()
    first, second = (replace(job_of(n), tag=n, folder=tmp_path) for n in range(2))
    inbox.jobs.put(second)
    job: WorkerJob | None = first
    for _ in range(3 - room):  # a batch each, or one of both
        assert job is not None
        assert worker._run_batch(job, inbox, process)
        job = inbox.take_arrived()
    assert job is None
    tags = [receive_raw(ours)[1] for _ in range(2 * len(events) + 2)]
    assert tags == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_a_stopped_job_leaves_the_others(workers: WarmWorkers, tmp_path: Path) -> None:
    begun = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, Step) and event.stage == "denoise" and event.step == 3:
            begun.set()

    whole = Listener(workers, job_of(0), note)
    assert begun.wait(120)
    runs = []
    with closing(workers.run(replace(job_of(1), root=tmp_path, pace=(0.0, 1.0)))) as events:
        for event in events:
            if isinstance(event, RunSaved):
                runs.append(event.path)
            if isinstance(event, Step) and event.stage == "denoise" and event.step == 2:
                break
    assert np.array_equal(whole.frames(), expected(0))
    assert np.array_equal(everyframe.resume(runs[0]).frames, expected(1))
    assert len(processes(workers)) == 1


@pytest.mark.slow
def test_a_death_is_reported_to_every_job(workers: WarmWorkers, tmp_path: Path) -> None:
    runs: list[Path] = []

    def note(event: Event) -> None:
        if isinstance(event, RunSaved):
            runs.append(Path(event.path))
        steps = [each for each in listeners if any(isinstance(e, Step) for e in each.events)]
        if isinstance(event, Step) and event.stage == "denoise" and len(steps) == 2:
            (process,) = processes(workers)
            os.kill(process, signal.SIGKILL)

    listeners: list[Listener] = []
    for seed in range(2):
        job = replace(job_of(seed), root=tmp_path, pace=(0.0, 1.0))
        listeners.append(Listener(workers, job, note))
    for listener in listeners:
        listener.join(120)
        assert isinstance(listener.error, WorkerDiedError)
        assert "SIGKILL" in str(listener.error)
        assert "resume it" in str(listener.error)
    made = {everyframe.resume(run).frames.tobytes() for run in runs}
    assert made == {expected(seed).tobytes() for seed in range(2)}
    assert np.array_equal(Listener(workers, job_of(2)).frames(), expected(2))
