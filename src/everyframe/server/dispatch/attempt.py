"""One attempt of a job: run it or resume its run, write its files, and keep its row current.

The row gets progress at most twice a second and at each stage. `dispatcher.py` starts attempts and
decides what follows from their errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everyframe.core.errors import (
    CannotRunError,
    LeftBatchError,
    OutOfMemoryInfo,
    RunLockedError,
)
from everyframe.core.events import (
    ComponentLoaded,
    Event,
    FramesDecoded,
    Note,
    Planned,
    Preview,
    Repaired,
    RunSaved,
    StageDone,
    StageStarted,
    Step,
    VideoDone,
)
from everyframe.core.plan import Plan
from everyframe.engine.workers.executor import Executor
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.position import NOWHERE, saved_position
from everyframe.server.data_folder import DataFolder
from everyframe.server.dispatch.outputs import JobOutputs
from everyframe.server.dispatch.plan_summary import plan_data, resolved_of
from everyframe.server.dispatch.progress import ProgressMeter
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore

#: Seconds between two writes of progress.
_PAUSE = 0.5
#: Seconds that the workers of a server that died have to end.
_LOCK_SECONDS = 20.0


@dataclass(frozen=True)
class AttemptOptions:
    """How jobs are run.

    Attributes:
        pace: how often run state is saved, as in `WorkerJob`; None for the default.
        has_previews: whether previews are made during the run.
        on_preview: called with (job id, event) for each preview.
    """

    pace: tuple[float, float] | None = None
    has_previews: bool = True
    on_preview: Callable[[str, Event], None] = lambda id, event: None  # noqa: A006


class Attempt:
    """One attempt of a job in a device group; `devices` are the group's, None for any.

    `batch` names the batch that it may be computed in. For a job in a batch, ``on_plan(plan)`` is
    called with its plan, and ``on_frames()`` after its last frames, so that other jobs may join.

    Attributes:
        stop: stops the attempt, from any thread; its run folder stays.
        reason: why it was stopped: ``cancel`` or ``drain``.
        has_resumed: whether it resumed an earlier run.
        has_stepped: whether it completed a step.
    """

    def __init__(
        self,
        job: Job,
        store: JobStore,
        executor: Executor,
        options: AttemptOptions,
        devices: str | None = None,
        out_of_memory: OutOfMemoryInfo | None = None,
        *,
        batch: str | None = None,
        on_plan: Callable[[Plan], None] = lambda plan: None,
        on_frames: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self.stop = StopSwitch()
        self.reason = ""
        self.has_resumed = self.has_stepped = False
        self._store = store
        self._folder: DataFolder = store.folder
        self._executor = executor
        self._options = options
        self._devices = devices
        self._out_of_memory = out_of_memory
        self._batch, self._on_plan, self._on_frames = batch, on_plan, on_frames
        self._report: dict[str, Any] = {"warnings": [], "repairs": [], **job.report}
        self._stages: dict[str, float] = dict(self._report.get("stage_durations", {}))
        self._began = time.monotonic()
        self._last_write = self._ended = 0.0
        self._began_at, self._has_advanced = NOWHERE, False
        self._is_to_say_where = False
        self._run = job.run
        self._open = ExitStack()
        self._last: VideoDone | None = None
        # Beginnings of notes that warn of nothing.
        self._routine: tuple[str, ...] = ("previews ",)
        self._meter: ProgressMeter | None = None

    def halt(self, reason: str) -> None:
        """Stop the attempt for this reason."""
        self.reason = self.reason or reason
        self.stop.set()

    @property
    def has_advanced(self) -> bool:
        """Whether more is saved than when the attempt began.

        A run that starts over must also get further than the runs before it.
        """
        if not self._has_advanced and self._meter is not None:
            saved = self._folder.saved_run(self.job.id)
            is_first = self.has_resumed or self.job.attempts <= 1
            is_further = is_first or self._meter.percent > self.job.progress
            self._has_advanced = (
                is_further and saved is not None and saved_position(saved) > self._began_at
            )
        return self._has_advanced

    def report(self) -> dict[str, Any]:
        """The job's report so far."""
        until = self._ended or time.monotonic()
        spent = self._report.get("inference_time_s", 0.0) + until - self._began
        return {
            **self._report,
            "stage_durations": self._stage_durations(),
            "inference_time_s": round(spent, 3),
        }

    def fields(self, *warnings: str) -> dict[str, Any]:
        """Fields of the row of a job that did not finish: report, progress, run to resume."""
        report = self.report()
        report["warnings"] = [*report["warnings"], *warnings]
        progress = self.job.progress if self._meter is None else self._meter.percent
        try:
            run = self._folder.saved_run_path(self.job.id)  # of which the row may not know yet
        except OSError:  # no file can be opened now; the next attempt looks again
            run = self._run
        return {"report": report, "progress": progress, "run": run}

    def run(self) -> None:
        """Generate the frames of the job's video; `finish` writes its remaining files.

        Raises any error of the run, and `RunStoppedError` after `halt`.
        """
        saved = self._saved_run()
        self.has_resumed = self._is_to_say_where = saved is not None
        if saved is not None:
            self._began_at = saved_position(saved)
            # The job's own event says where.
            self._routine = (*self._routine, "resuming ", "starting ")
        events = self._executor.run(self._worker_job(saved), None, self.stop)
        with closing(events), ExitStack() as stack:
            planned = next(events)
            assert isinstance(planned, Planned), "the plan comes first"
            if planned.plan.infeasible is not None:
                raise CannotRunError(planned.plan.infeasible)
            self._take_plan(planned.plan)
            outputs = self._outputs = JobOutputs(self._folder, self.job.id, planned.plan)
            stack.enter_context(outputs)
            hands_over = self._batch is not None
            for event in events:
                if isinstance(event, VideoDone) and outputs.is_last(event):
                    self._last = event
                    continue
                if hands_over and isinstance(event, FramesDecoded) and outputs.has_all_with(event):
                    self._on_frames()
                note = outputs.take(event)
                if note is not None:
                    self._warn(note)
                self._take(event)
            assert self._last is not None, "a run ends with its video"
            self._open = stack.pop_all()
        self._ended = time.monotonic()

    def finish(self) -> None:
        """Write the remaining files and complete the row; the devices are free for another job.

        The run folder is deleted last, so neither an error nor a crash here costs a step.

        Raises:
            MediaError: the files can't be written; `OSError` likewise.
            StoreError: the row can't be written.
        """
        assert self._last is not None
        with self._open:
            self._outputs.take(self._last)
            checks = {"num_frames": self._outputs.num_frames, "is_finite": True,
                      "is_read_back": True}  # fmt: skip
            fields = self._outputs.publish({"report": {**self.report(), "checks": checks}})
        self._store.finish(self.job.id, "completed", **fields)
        self._folder.remove_runs(self.job.id)

    def _worker_job(self, saved: RunFolder | None) -> WorkerJob:
        id = self.job.id  # noqa: A001
        root = self._folder.new_runs_of(id)
        # What a killed server leaves of its workers goes with the job.
        common = WorkerJob(as_uint8=True, pace=self._options.pace, keeps_run=True, temporary=root)
        if saved is not None:
            # On other devices only rounding differs; they are named where they are others.
            ranks = {"devices": self._devices} if self._has_moved() else None
            return replace(common, run=saved.path, ranks=ranks, out_of_memory=self._out_of_memory)
        options = dict(self.job.request)
        if self._devices is not None:
            options["devices"] = self._devices
        if self._options.has_previews:
            options.setdefault("preview", True)
        request = self._folder.request_of(options)
        if request.num_ranks > 1:
            self._batch = None
        return replace(common, request=request, root=root, batch=self._batch)

    def _has_moved(self) -> bool:
        return self._devices is not None and self.job.resolved.get("devices") != self._devices

    def _saved_run(self) -> RunFolder | None:
        """The run to resume; waits until workers of a dead server have released it."""
        root, until = self._folder.runs_of(self.job.id), time.monotonic() + _LOCK_SECONDS
        while any(run.is_busy() for run in all_runs(root)):
            self.stop.check()
            if time.monotonic() > until:
                raise RunLockedError(f"the run of {self.job.id} is in use by another process")
            time.sleep(0.05)
        saved = self._folder.saved_run(self.job.id)
        if saved is not None and self._batch is not None:
            raise LeftBatchError("it has a run, which is resumed alone")
        return saved

    def _take_plan(self, plan: Plan) -> None:
        plan = replace(plan, model=self.job.model)  # its name for clients, who see no folder
        self._meter = ProgressMeter(plan, at_least=self.job.progress)
        resolved = {**self.job.resolved, **resolved_of(plan)}
        if self._devices is not None:
            resolved["devices"] = self._devices
        if self._batch is not None:
            self._on_plan(plan)
        self._store.update(self.job.id, resolved=resolved, event=("planned", plan_data(plan)))
        for note in plan.notes:
            self._warn(note)

    def _take(self, event: Event) -> None:
        assert self._meter is not None
        self._meter.take(event)
        if isinstance(event, ComponentLoaded):
            spent = self._report.get("load_seconds", 0.0) + event.seconds
            self._report["load_seconds"] = round(spent, 4)
        elif isinstance(event, StageDone) and event.peak_bytes is not None:
            peak = max(self._report.get("peak_memory_mb") or 0, event.peak_bytes / 1e6)
            self._report["peak_memory_mb"] = round(peak, 1)
        elif isinstance(event, RunSaved):  # written with the stage that follows
            self._run = str(Path(event.path).relative_to(self._folder.path))
        elif isinstance(event, StageStarted):
            data = {"stage": event.stage, "num_steps": event.num_steps, "clip": event.clip,
                    "num_clips": event.num_clips}  # fmt: skip
            self._write("stage", data)
        elif isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Repaired):
            shown = event.to_json()
            del shown["type"]
            self._report["repairs"] = [*self._report["repairs"], shown]
            self._store.update(self.job.id, report=self.report(), event=("repaired", shown))
        elif isinstance(event, Note):
            self._warn(event.text)
        elif isinstance(event, Preview):
            self._options.on_preview(self.job.id, event)

    def _step(self, event: Step) -> None:
        assert self._meter is not None
        self.has_stepped = True
        if self._is_to_say_where:
            self._is_to_say_where = False
            self._report["resumed_from_step"] = event.step - 1
            data = {"stage": event.stage, "step": event.step - 1}
            self._store.update(self.job.id, report=self.report(), event=("resumed", data))
        if time.monotonic() - self._last_write >= _PAUSE:
            fields = self._meter.fields()
            self._write("progress", {**fields, "s_per_step": round(event.seconds, 4)}, fields)

    def _write(
        self, kind: str, data: Mapping[str, Any], fields: Mapping[str, Any] | None = None
    ) -> None:
        """Write progress into the row; a job that advanced starts a new count of attempts."""
        assert self._meter is not None
        values = {"run": self._run, **(self._meter.fields() if fields is None else fields)}
        if (self.job.attempts > 1 or self.job.interruptions) and self.has_advanced:
            values |= {"attempts": 1, "interruptions": 0}
        self._store.update(self.job.id, event=(kind, data), **values)
        self._last_write = time.monotonic()

    def _warn(self, text: str) -> None:
        text = self._folder.without_place(text)
        if text not in self._report["warnings"] and not text.startswith(self._routine):
            self._report["warnings"] = [*self._report["warnings"], text]
            self._store.update(self.job.id, report=self.report(), event=("note", {"text": text}))

    def _stage_durations(self) -> dict[str, float]:
        """Seconds of each stage, over all attempts."""
        now = {} if self._meter is None else self._meter.stage_durations
        names = {**self._stages, **now}
        return {name: round(self._stages.get(name, 0.0) + now.get(name, 0.0), 4) for name in names}
