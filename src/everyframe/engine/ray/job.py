"""One job on a Ray cluster, over all of its groups of ranks, with its run folder on this machine.

The ranks' saved state is copied here after each save. A lost rank ends its group; the job resumes
from that copy in a new group, on fewer devices if need be.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from everyframe.core.errors import (
    DevicesBusyError,
    DistributedOutOfMemoryError,
    InputError,
    OutOfMemoryInfo,
    WorkerDiedError,
)
from everyframe.core.events import Event, Events, Note, Planned, RunSaved
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable
from everyframe.engine.ray.group import (
    HeadLostError,
    RankFailedError,
    RankLostError,
    has_gpus,
    num_free,
    placed_group,
)
from everyframe.engine.ray.input_transfer import InputFiles, absolute_models, read_inputs
from everyframe.engine.ray.message_bytes import to_bytes
from everyframe.engine.ray.run_transfer import (
    RunChanges,
    RunReader,
    with_texts,
    write_changes,
)
from everyframe.engine.workers.error_transfer import with_resume_hint
from everyframe.engine.workers.launcher import EventDeduplicator, ranks_of
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import Lock, RunFolder, new_run

#: Options of the division among devices, which has another meaning on fewer of them.
_OF_RANKS = ("parallel", "shares", "shard_weights")
#: Losses without a newly saved state in between after which a job ends.
_MOST_LOSSES = 3


def run_on_cluster(
    job: WorkerJob, place: Path, seconds: float, stop: StopSwitch | None = None
) -> Events:
    """Run a job with its ranks on the cluster and yield its events, as `run_in_workers` does.

    `place` is where relative paths are; each group of ranks waits `seconds` for free devices.

    Raises:
        DevicesBusyError: no devices are free; the run folder is left.
        RunStoppedError: `stop` was set; the run folder is left.
        WorkerDiedError: ranks are lost again and again; the run folder is left.
        EveryframeError: any error of a rank.
    """
    _check(job)
    run = _SavedRun(job, place)
    try:
        yield from _attempts(job, run, seconds, stop)
        run.remove()
    finally:
        run.release()


def _attempts(job: WorkerJob, run: _SavedRun, seconds: float, stop: StopSwitch | None) -> Events:
    """The events of all groups, each once; `Planned` is the first of them."""
    deduplicator, number, lost = EventDeduplicator(), len(job.weights), ""
    out_of_memory: OutOfMemoryInfo | None = None
    notes, losses, is_planned, num_videos = run.notes, 0, False, 0
    while True:
        if is_planned:
            yield from run.taken_notes()
        asked = run.job_now(job, number, deduplicator.done, out_of_memory)
        try:
            with closing(_group_events(asked, run, seconds, stop)) as events:
                for event in events:
                    new = deduplicator.new(event)
                    if new is not None:
                        yield new
                    if isinstance(event, Planned):
                        is_planned, num_videos = True, event.plan.settings.num_videos
                    if is_planned:
                        yield from run.taken_notes()
            return
        except RankFailedError as failed:
            error = failed.error
            if not (isinstance(error, DistributedOutOfMemoryError) and run.is_saved):
                if not failed.keeps:
                    run.remove()
                raise run.with_hint(error) from error.__cause__
            out_of_memory = error.out_of_memory
            run.has_new_plan()
        except RankLostError as gone:
            if num_videos and len({*job.skip, *deduplicator.done}) >= num_videos:
                return  # all of it was handed on before the loss was seen
            if run.has_new_plan():  # it needs less already
                out_of_memory = None
            losses = 1 if run.has_news() else losses + 1
            lost = gone.text
            if losses >= _MOST_LOSSES:
                text = f"{lost}, after {losses - 1} losses before it without progress"
                raise run.with_hint(WorkerDiedError(text)) from gone
            begins = "resumes from its last saved state" if run.is_saved else "begins again"
            notes.append(Note(f"{lost}; the run {begins} in a new group"))
        except HeadLostError as gone:
            raise run.with_hint(DevicesBusyError(str(gone))) from gone
        except DevicesBusyError as full:
            if not lost:
                raise
            fewer = min(number - 1, num_free(_kind(asked)))
            if fewer < 1:
                busy = DevicesBusyError(f"{lost}, and no device is free")
                raise run.with_hint(busy) from full
            begins = "resumes" if run.is_saved else "begins again"
            notes.append(Note(f"no {number} devices are free within {seconds:g} s; the run "
                              f"{begins} on {fewer}, which differs by rounding"))  # fmt: skip
            number = fewer
            continue
        if is_planned:  # else nothing was handed on that would come again
            deduplicator.again()


def _group_events(
    job: WorkerJob, run: _SavedRun, seconds: float, stop: StopSwitch | None
) -> Events:
    """The events of the job in one group; what its ranks save is saved here."""
    copy = to_bytes("run", run.copy())
    inputs = run.inputs(job)
    with placed_group(len(job.weights), _kind(job), seconds, stop) as group:
        ranks = group.meet()
        sent = to_bytes("inputs", inputs)
        for name, value in group.events(ranks, job, run.name, copy, sent):
            if name == "state":
                run.write(value)
            elif isinstance(value, RunSaved):
                if run.is_saved:
                    yield RunSaved(run.name, str(run.path))
            else:
                yield value


def _check(job: WorkerJob) -> None:
    """Raise `InputError` for options that have no meaning on a cluster."""
    request = job.request
    ranks = job.ranks or {}
    if ranks.get("devices") or (request is not None and request.devices is not None):
        raise InputError(
            "devices names devices of one machine, and Ray chooses them; give their number: "
            "--num-devices N"
        )
    if request is not None and request.report is not None:
        raise InputError(
            "report writes a folder on the machine that computes, which is another one; leave "
            "--report out, or run on one machine"
        )


def _kind(job: WorkerJob) -> str:
    """Ray's name of the devices of a job."""
    if job.request is not None:
        device = job.request.device
        is_cpu = device == "cpu" or (device == "auto" and not has_gpus())
    else:
        assert job.run is not None, "a job is a request or a run"
        plan = from_jsonable(RunFolder(job.run).run()["plan"], lambda _: None)
        is_cpu = isinstance(plan, Plan) and plan.device.kind == "cpu"
    return "CPU" if is_cpu else "GPU"


class _SavedRun:
    """The run folder of a job on this machine, locked by this process; or none."""

    def __init__(self, job: WorkerJob, place: Path) -> None:
        self.notes: list[Event] = []
        self._logged: set[str] = set()
        self._place = place
        self._folder: RunFolder | None = None
        self._lock: Lock | None = None
        self._has_news = self._has_run = self._has_plan = False
        try:
            if job.run is not None:
                self._folder = RunFolder(job.run)
            elif job.root is not None and not job.plans:
                self._folder = new_run(job.root)
            if self._folder is not None:
                self._lock = self._folder.lock()
        except OSError as error:
            if job.run is not None:
                raise InputError(
                    f"the run {job.run.name} cannot be resumed in {job.run.parent} "
                    f"({error.strerror}); copy its folder to another disk and give it by its path"
                ) from error
            if self._folder is not None:  # it can't be locked
                self._folder.remove()
            self._folder = None
            self._note(
                f"this run can't be saved in {job.root} ({error.strerror}), so a lost node means a "
                "new beginning; EVERYFRAME_RUNS names another folder"
            )

    @property
    def name(self) -> str:
        return "run" if self._folder is None else self._folder.name

    @property
    def path(self) -> Path:
        assert self._folder is not None, "a run that isn't saved has no place"
        return self._folder.path

    @property
    def is_saved(self) -> bool:
        return self._folder is not None and self._folder.is_saved

    def with_hint(self, error: Exception) -> Exception:
        """The error with how to resume the run."""
        return with_resume_hint(error, self._folder)

    def job_now(
        self, job: WorkerJob, number: int, done: list[int], out_of_memory: OutOfMemoryInfo | None
    ) -> WorkerJob:
        """The job for `number` ranks, as far as it is saved."""
        skip = (*job.skip, *done)
        if not self.is_saved:
            asked = job.request
            if asked is not None and number != len(job.weights):
                given = {k: v for k, v in asked.given().items() if k not in _OF_RANKS}
                asked = Request(**{**given, "num_devices": number})
            if asked is not None:
                asked = with_texts(asked, absolute_models(asked, self._place))
            root = None if self._folder is None else job.root
            return replace(job, request=asked, root=root, weights=(1.0,) * number, skip=skip)
        assert self._folder is not None
        trusts = job.trust_remote_code
        if job.request is not None:
            trusts = bool(job.request.family_options.get("trust_remote_code"))
        # The requested devices, until the first plan on other devices arrives.
        ranks = job.ranks if not self._has_run and number == len(job.weights) else None
        if ranks is None and number != ranks_of(self._folder):
            ranks = {"num_devices": number}
        named = None if job.run is None else job.named
        return replace(
            job, request=None, run=self.path, root=None, skip=skip, ranks=ranks,
            out_of_memory=out_of_memory, named=named, trust_remote_code=trusts,
            weights=(1.0,) * number,
        )  # fmt: skip

    def copy(self) -> RunChanges | None:
        """All that is saved, for the ranks."""
        if not self.is_saved:
            return None
        assert self._folder is not None
        changes = RunReader(self._folder, is_lead=True).changes()
        request = self._own_request()
        if changes is None or request is None:
            return changes
        # The nodes have another working folder than the machine that began it.
        return changes.with_texts(absolute_models(request, self._place))

    def inputs(self, job: WorkerJob) -> InputFiles:
        """The input files of the job; of a stranger's run only those that were named again."""
        request = self._own_request() if job.request is None else job.request
        return read_inputs(request, self._place, job.named)

    def _own_request(self) -> Request | None:
        """The request of the run, unless it is a stranger's."""
        assert self._folder is not None
        if not self._folder.is_own():
            return None
        found = from_jsonable(self._folder.run()["request"], lambda _: None)
        return found if isinstance(found, Request) else None

    def write(self, changes: RunChanges) -> None:
        """Write what a rank saved; a disk that fails is a note."""
        if self._folder is None:
            return
        try:
            write_changes(self._folder, changes, self._place, {})
        except OSError as error:
            self._note(
                f"the run state can't be written to {self.path} ({error.strerror}); if a node is "
                "lost, the run resumes from the last state that was written"
            )
            return
        self._has_run |= changes.run is not None
        self._has_plan |= changes.run is not None
        self._has_news |= bool(changes.files)

    def taken_notes(self) -> Iterator[Event]:
        """Yield and clear the queued notes."""
        while self.notes:
            yield self.notes.pop(0)

    def has_news(self) -> bool:
        """Whether a state was saved since the last call."""
        news, self._has_news = self._has_news, False
        return news

    def has_new_plan(self) -> bool:
        """Whether a rank wrote the constant data since the last call."""
        has_plan, self._has_plan = self._has_plan, False
        return has_plan

    def remove(self) -> None:
        """Delete what is saved."""
        if self._folder is not None:
            self._folder.remove()

    def release(self) -> None:
        """Unlock the folder, and delete it if the run never began."""
        if self._folder is not None and not self.is_saved:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    def _note(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self.notes.append(Note(text))
