"""Interface of executors, which run jobs somewhere else than in the calling process. No torch.

`warm_workers.py` keeps worker processes from job to job; `ray/executor.py` runs on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everyframe.core.errors import CannotRunError
from everyframe.core.events import Events, Planned
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers.launcher import ranks_of
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.folder import RunFolder


@dataclass(frozen=True)
class WarmModel:
    """A model whose components an executor holds in memory between jobs.

    Attributes:
        model: name of the model, as in its plan.
        num_bytes: memory of its loaded components, over all ranks.
        since: when its last job ended, in seconds since the epoch.
        devices: names of the devices of its ranks, such as ``cuda:0``.
        is_busy: whether a job of it runs now.
    """

    model: str
    num_bytes: int
    since: float
    devices: tuple[str, ...]
    is_busy: bool = False


LoadedComponent = tuple[str, int, float, str]
"""A component that stays in memory: its model, bytes, time of the last use, and device."""


def warm_models(loaded: Iterable[LoadedComponent], *, is_busy: bool = False) -> list[WarmModel]:
    """The models of these components."""
    by_model: dict[str, list[LoadedComponent]] = {}
    for each in loaded:
        by_model.setdefault(each[0], []).append(each)
    return [
        WarmModel(
            model,
            sum(size for _, size, _, _ in parts),
            max(since for *_, since, _ in parts),
            tuple(dict.fromkeys(device for *_, device in parts)),
            is_busy,
        )
        for model, parts in by_model.items()
    ]


class InfeasiblePlanError(CannotRunError):
    """This machine can't run the plan, which is `plan`."""

    def __init__(self, plan: Plan, text: str | None = None) -> None:
        super().__init__(text or plan.infeasible)
        self.plan = plan

    def reworded(self, text: str) -> InfeasiblePlanError:
        """Copy of the error with another text."""
        return InfeasiblePlanError(self.plan, text)


class Executor(Protocol):
    """Runs jobs somewhere else than in the calling process. All methods are thread-safe.

    Attributes:
        has_batches: whether jobs of one `WorkerJob.batch` may be run at the same time.
    """

    has_batches: bool

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        """Run a job and yield its events as they happen, as `everyframe.stream` does.

        The number of ranks is that of the job's request or run. Closing the generator stops the run
        and leaves its run folder, which a job with `run` resumes; a finished run removes it.
        `place` is the folder from which relative paths are read.

        Raises:
            EveryframeError: any error of the run itself; `WorkerDiedError` if a process crashed.
            RunStoppedError: `stop` was set, by any thread.
        """
        ...

    def plan(self, request: Request) -> Plan:
        """The plan of a request, with its forecast; nothing is loaded or fetched.

        Raises:
            InputError: an option is invalid for this model.
            InfeasiblePlanError: this machine can't run it.
        """
        ...

    def describe(self) -> list[WarmModel]:
        """The models that are warm now."""
        ...

    def close(self) -> None:
        """Stop all jobs, leaving their run folders, and end all processes."""
        ...


def with_own_ranks(job: WorkerJob) -> WorkerJob:
    """The job for as many ranks as its request or its run has, unless it names several already."""
    if len(job.weights) > 1 or job.plans:
        return job
    if job.request is not None:
        return job.of_ranks(job.request.num_ranks)
    assert job.run is not None, "a job is a request or a run"
    asked = Request(**job.ranks).num_ranks if job.ranks else ranks_of(RunFolder(job.run))
    return job.of_ranks(asked)


def feasible_plan(events: Events) -> Plan:
    """The plan among events; `CannotRunError` if it can't run here."""
    plan = next(event.plan for event in events if isinstance(event, Planned))
    if plan.infeasible is not None:
        raise InfeasiblePlanError(plan)
    return plan
