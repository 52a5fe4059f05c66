"""A stand-in for an executor: real events, run folders and stop switches, made-up frames, no torch.

Its frames depend on the seed only, so a test can tell whose video it is. A run's state is its
number of finished steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from everyframe.core.errors import InputError
from everyframe.core.events import (
    Event,
    Events,
    FramesDecoded,
    Planned,
    RunSaved,
    StageDone,
    StageStarted,
    Step,
    VideoDone,
    WeightsReady,
)
from everyframe.core.plan import Plan, StagePlan
from everyframe.core.request import Request
from everyframe.engine.workers.executor import WarmModel
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import RunFolder, new_run
from helpers.fake_engine import plan_of

STAGES = ("text", "denoise", "decode")
NUM_STEPS = 5


def frames_of(seed: int, num_frames: int = 4) -> np.ndarray[Any, Any]:
    """The frames of a seed: four blocks, each in a grey of its own."""
    greys = np.random.default_rng(seed).integers(0, 255, (2, 2), np.uint8)
    frame = np.repeat(np.kron(greys, np.ones((32, 32), np.uint8))[..., None], 3, axis=-1)
    return np.stack([frame] * num_frames)


class FakeExecutor:
    """Runs jobs with `pause` seconds a step; `failures` end the first attempts.

    Each failure is (finished steps, error), or None for an attempt that succeeds. Steps after
    `most_saved` of an attempt are not saved.
    """

    has_batches = False

    def __init__(
        self,
        pause: float = 0.0,
        failures: Sequence[tuple[int, Exception] | None] = (),
        most_saved: Sequence[int] = (),
    ) -> None:
        self.pause = pause
        self.failures = list(failures)
        self.most_saved = list(most_saved)
        self.jobs: list[WorkerJob] = []
        self.steps: list[tuple[int, int]] = []

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        self.jobs.append(job)
        failure = self.failures.pop(0) if self.failures else None
        return self._events(job, stop or StopSwitch(), failure)

    def plan(self, request: Request) -> Plan:
        if request.prompt == "bad":
            raise InputError("prompt must be good")
        stages = tuple(
            StagePlan(name, name, 0, 1, 1.0, seconds)
            for name, seconds in zip(STAGES, (1.0, 8.0, 1.0), strict=True)
        )
        return replace(plan_of(request), stages=stages, notes=())

    def describe(self) -> list[WarmModel]:
        return []

    def close(self) -> None: ...

    def _events(
        self, job: WorkerJob, stop: StopSwitch, failure: tuple[int, Exception] | None
    ) -> Iterator[Event]:
        if job.run is not None:
            run = RunFolder(job.run)
            values = run.run()["request"]
        else:
            assert job.request is not None
            assert job.root is not None
            values = {k: v for k, v in job.request.given().items() if k != "family_options"}
            run = new_run(job.root)
        request = Request(**values)
        yield Planned(self.plan(request))
        yield WeightsReady({})
        state = run.state() if job.run is not None else None
        done = 0 if state is None else int(state["takes"][0]["step"])
        most_saved = self.most_saved.pop(0) if self.most_saved else NUM_STEPS
        with_lock = None
        try:
            if job.run is None:
                run.write_run({"began": time.time(), "request": values})
            with_lock = run.lock()
            yield RunSaved(run.name, str(run.path))
            if failure is not None and failure[0] < 0:  # before the first step of any stage
                raise failure[1]
            assert request.seed is not None
            if state is None:
                yield StageStarted("text", 1)
                yield Step("text", 1, 1, request.seed, 0.0)
                yield StageDone("text", 0.01)
            yield StageStarted("denoise", NUM_STEPS)
            for step in range(done + 1, NUM_STEPS + 1):
                self._wait(stop)
                if failure is not None and step > failure[0]:
                    raise failure[1]
                if step <= most_saved:
                    takes = [{"seed": request.seed, "step": step}]
                    run.write_state({"clip": 0, "stage": 1, "takes": takes})
                self.steps.append((request.seed, step))
                yield Step("denoise", step, NUM_STEPS, request.seed, self.pause)
            yield StageDone("denoise", 0.05)
            yield StageStarted("decode", 1)
            for seed in range(request.seed, request.seed + request.num_videos):
                frames = frames_of(seed)
                yield FramesDecoded(seed, len(frames), frames)
                record = {"request": {"prompt": request.prompt, "seed": seed}}
                yield VideoDone(seed, len(frames), record)
            yield StageDone("decode", 0.01)
            if not job.keeps_run:
                run.remove()
        finally:
            if with_lock is not None:
                with_lock.release()

    def _wait(self, stop: StopSwitch) -> None:
        if self.pause:
            stop.connection.poll(self.pause)
        stop.check()
