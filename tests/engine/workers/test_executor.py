"""Executors run jobs in other processes: plans, errors, and a run that another thread stops."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import everyframe
from everyframe.core.errors import CannotRunError, InputError, RunStoppedError
from everyframe.core.request import Request
from everyframe.engine.workers.executor import Executor
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob

REQUEST = Request(prompt="a red circle", num_frames=4, height=32, width=32, seed=3)


def test_a_process_with_an_executor_has_no_torch() -> None:
    code = "import sys, everyframe.engine.workers.executor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_is_made_in_a_worker() -> None:
    with closing(WarmWorkers()) as workers:
        executor: Executor = workers
        here, there = everyframe.plan(REQUEST), executor.plan(REQUEST)
        assert (there.settings, there.components) == (here.settings, here.components)
        with pytest.raises(InputError, match="unknown model"):
            executor.plan(Request(prompt="a", model="no-such-model"))
        with pytest.raises(CannotRunError, match="memory"):
            executor.plan(Request(**{**REQUEST.given(), "max_memory": "1 MB"}))


def test_a_run_stops_from_another_thread_while_its_next_event_is_awaited(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    stop = StopSwitch()
    events = run_in_workers(WorkerJob(REQUEST, root=tmp_path), stop=stop)
    timer = threading.Timer(0.05, stop.set)  # the process imports for longer
    timer.start()
    began = time.monotonic()
    with pytest.raises(RunStoppedError):
        list(events)
    assert time.monotonic() - began < 2
    timer.join()
    stop.set()
    with pytest.raises(RunStoppedError):
        stop.check()
    assert {child.pid for child in psutil.Process().children()} <= before, "the worker is gone"
