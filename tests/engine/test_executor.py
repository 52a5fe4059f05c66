"""Executors run jobs in other processes: events, plans, errors, and what a stopped run leaves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

import everyframe
from everyframe.core.errors import CannotRunError, InputError, RunStoppedError
from everyframe.core.events import FramesDecoded, RunSaved, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.executor import Executor, FreshWorkers
from everyframe.engine.stop_switch import StopSwitch
from everyframe.engine.worker_process import WorkerJob

REQUEST = Request(prompt="a red circle", num_frames=4, height=32, width=32, seed=3)


def test_a_process_with_an_executor_has_no_torch() -> None:
    code = "import sys, everyframe.engine.executor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_is_made_in_a_worker() -> None:
    executor: Executor = FreshWorkers()
    here, there = everyframe.plan(REQUEST), executor.plan(REQUEST)
    assert (there.settings, there.components) == (here.settings, here.components)
    with pytest.raises(InputError, match="unknown model"):
        executor.plan(Request(prompt="a", model="no-such-model"))
    with pytest.raises(CannotRunError, match="memory"):
        executor.plan(Request(**{**REQUEST.given(), "max_memory": "1 MB"}))


@pytest.mark.slow
def test_a_stopped_job_leaves_a_run_that_a_job_resumes(tmp_path: Path) -> None:
    executor, folder = FreshWorkers(), None
    job = WorkerJob(REQUEST, root=tmp_path, as_uint8=True, pace=(0.0, 1.0))
    with closing(executor.run(job)) as events:
        for event in events:
            folder = event.path if isinstance(event, RunSaved) else folder
            if isinstance(event, Step) and event.stage == "denoise" and event.step == 2:
                break
    assert folder is not None
    assert Path(folder).is_dir()
    events = executor.run(WorkerJob(run=Path(folder), as_uint8=True))
    frames = [event for event in events if isinstance(event, (FramesDecoded, VideoDone))]
    made = np.concatenate([each.frames for each in frames if isinstance(each, FramesDecoded)])
    assert isinstance(frames[-1], VideoDone)
    assert not Path(folder).exists()
    assert np.array_equal(made, everyframe.generate(**REQUEST.given(), run_dir="off").frames)


def test_a_run_stops_from_another_thread_while_its_next_event_is_awaited(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    stop = StopSwitch()
    events = FreshWorkers().run(WorkerJob(REQUEST, root=tmp_path), stop=stop)
    timer = threading.Timer(0.05, stop.set)  # the process imports for longer
    timer.start()
    began = time.monotonic()
    with pytest.raises(RunStoppedError):
        list(events)
    assert time.monotonic() - began < 2
    timer.join()
    stop.set()
    assert stop.is_set
    assert {child.pid for child in psutil.Process().children()} <= before, "the worker is gone"
