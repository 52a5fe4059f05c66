"""Workers that stay: job after job, deaths that end one job alone, jobs that are stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.core.errors import (
    EveryframeError,
    InputError,
    NotSerializableError,
    WorkerDiedError,
)
from everyframe.core.events import ComponentLoaded, Event, FramesDecoded, RunSaved, Step
from everyframe.core.request import Request
from everyframe.engine.workers.executor import Executor
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob

GIVEN = {"prompt": "a red circle", "num_frames": 4, "height": 32, "width": 32, "seed": 3}
REQUEST = Request(**GIVEN)
LONG = Request(**{**GIVEN, "num_inference_steps": 60})


@pytest.fixture(scope="module")
def workers() -> Iterator[WarmWorkers]:
    made = WarmWorkers()
    yield made
    made.close()


def frames_in(events: list[Event]) -> np.ndarray:
    return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])


def process_of(workers: WarmWorkers) -> int:
    group = next(iter([*workers._busy, *workers._idle]))
    return group.workers[0].process_id


def test_jobs_follow_each_other_in_one_process(workers: WarmWorkers, tmp_path: Path) -> None:
    timers = sum(isinstance(each, threading.Timer) for each in threading.enumerate())
    executor: Executor = workers
    job = WorkerJob(REQUEST, as_uint8=True)
    first = list(executor.run(job))
    process = process_of(workers)
    with pytest.raises(InputError, match="height"):
        list(executor.run(WorkerJob(Request(prompt="a red circle", height=33))))
    plan = executor.plan(REQUEST)
    again = list(executor.run(job, tmp_path))
    assert process_of(workers) == process
    assert plan.settings.num_frames == 4
    expected = everyframe.generate(**GIVEN, run_dir="off").frames
    assert np.array_equal(frames_in(first), expected)
    assert np.array_equal(frames_in(again), expected)

    # The same events, but that the prompt is encoded already.
    def kinds(events: list[Event]) -> list[type[Event]]:
        return [type(each) for each in events if not isinstance(each, ComponentLoaded)]

    assert kinds(again) == kinds(first)
    assert sum(isinstance(each, ComponentLoaded) for each in again) == 2
    now = sum(isinstance(each, threading.Timer) for each in threading.enumerate())
    assert now <= timers + 1, "one thread waits for the end of idle time, not one a job"


def test_a_picture_of_any_mode_is_sent_and_what_can_not_be_costs_no_worker(
    workers: WarmWorkers,
) -> None:
    given = {**GIVEN, "num_frames": 17, "num_inference_steps": 2}
    given["image"] = Image.new("CMYK", (32, 32), (0, 200, 100, 10))
    frames = frames_in(list(workers.run(WorkerJob(Request(**given), as_uint8=True))))
    assert np.array_equal(frames, everyframe.generate(**given, run_dir="off").frames)
    process = process_of(workers)
    given["image"] = Image.new("PA", (32, 32))
    with pytest.raises(NotSerializableError, match="a picture of mode PA"):
        list(workers.run(WorkerJob(Request(**given))))
    assert process_of(workers) == process
    assert not workers._busy
    list(workers.run(WorkerJob(REQUEST)))
    assert process_of(workers) == process


@pytest.mark.slow
def test_a_dead_worker_ends_its_job_alone(workers: WarmWorkers, tmp_path: Path) -> None:
    runs: list[str] = []

    def consume() -> None:
        for event in workers.run(WorkerJob(LONG, root=tmp_path, pace=(0.0, 1.0))):
            if isinstance(event, RunSaved):
                runs.append(event.path)
            if isinstance(event, Step) and event.stage == "denoise" and event.step == 5:
                os.kill(process_of(workers), signal.SIGKILL)

    with pytest.raises(WorkerDiedError, match="resume it: everyframe resume") as died:
        consume()
    (run,) = runs
    assert "denoise" in str(died.value)
    assert Path(run).is_dir()
    list(workers.run(WorkerJob(REQUEST)))
    resumed = list(workers.run(WorkerJob(run=Path(run), as_uint8=True)))
    assert np.array_equal(
        frames_in(resumed), everyframe.generate(**LONG.given(), run_dir="off").frames
    )
    assert not Path(run).exists()


@pytest.mark.slow
def test_an_idle_worker_that_died_is_replaced(workers: WarmWorkers) -> None:
    workers.plan(REQUEST)
    process = process_of(workers)
    os.kill(process, signal.SIGKILL)
    workers._idle[0].workers[0]._process.wait()
    assert len(frames_in(list(workers.run(WorkerJob(REQUEST))))) == 4
    assert process_of(workers) != process


@pytest.mark.slow
def test_a_closed_job_stops_at_its_next_step(workers: WarmWorkers, tmp_path: Path) -> None:
    run = ""
    with closing(workers.run(WorkerJob(LONG, root=tmp_path, as_uint8=True))) as events:
        for event in events:
            run = event.path if isinstance(event, RunSaved) else run
            if isinstance(event, Step) and event.stage == "denoise" and event.step == 5:
                break
        process, begun = process_of(workers), time.perf_counter()
    assert time.perf_counter() - begun < 5.0
    assert process_of(workers) == process
    made = frames_in(list(workers.run(WorkerJob(REQUEST, as_uint8=True))))
    assert np.array_equal(made, everyframe.generate(**GIVEN, run_dir="off").frames)
    resumed = frames_in(list(workers.run(WorkerJob(run=Path(run), as_uint8=True))))
    assert np.array_equal(resumed, everyframe.generate(**LONG.given(), run_dir="off").frames)


@pytest.mark.slow
def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    workers = WarmWorkers(stop_seconds=0.5)
    with closing(workers.run(WorkerJob(LONG, root=tmp_path))) as events:
        for event in events:
            if isinstance(event, Step) and event.stage == "denoise":
                process = process_of(workers)
                os.kill(process, signal.SIGSTOP)
                break
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert workers.describe() == []
    workers.close()


@pytest.mark.slow
def test_a_plan_does_not_wait_for_a_job(workers: WarmWorkers, tmp_path: Path) -> None:
    with closing(workers.run(WorkerJob(LONG, root=tmp_path))) as events:
        for event in events:
            if isinstance(event, Step) and event.stage == "denoise":
                assert workers.plan(REQUEST).infeasible is None
                break


@pytest.mark.slow
def test_workers_end_when_they_are_idle_for_long() -> None:
    workers = WarmWorkers(keep_warm=2.0)  # the next line is reached before, on a busy machine too
    workers.plan(REQUEST)
    process = process_of(workers)
    until = time.monotonic() + 30
    while workers._idle and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    workers.close()


@pytest.mark.slow
def test_closing_ends_a_job_of_another_thread(tmp_path: Path) -> None:
    workers, messages = WarmWorkers(), []
    begun = threading.Event()

    def work() -> None:
        try:
            for event in workers.run(WorkerJob(LONG, root=tmp_path)):
                if isinstance(event, Step):
                    begun.set()
        except EveryframeError as error:
            messages.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    workers.close()
    thread.join(20)
    assert "its workers were closed" in messages[0]
    assert "everyframe resume" in messages[0]
    with pytest.raises(EveryframeError, match="closed"):
        workers.run(WorkerJob(REQUEST))
