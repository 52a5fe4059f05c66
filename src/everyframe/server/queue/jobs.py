"""Jobs and events of the server, as frozen values; `store.py` stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: States of a job. ``queued -> in_progress -> completed | failed | cancelled``; a job whose run was
#: interrupted goes back to ``queued``, and so does one that is retried.
STATUSES = ("queued", "in_progress", "completed", "failed", "cancelled")
#: States that a job leaves only by being retried.
FINAL = ("completed", "failed", "cancelled")
#: Final states that a retry leaves.
RETRIED = ("failed", "cancelled")


@dataclass(frozen=True)
class NewJob:
    """A job to be added to the queue.

    Attributes:
        request: options of the `Request` by name, as JSON data; files are relative to the data
            folder. A seed is drawn if there is none, so that every attempt makes the same video.
        owner: name of the client's key; empty without keys.
        model: name of the model, as `claim` compares it.
        resolved: what the plan says of the video, as JSON data.
        report: first entries of the job's report, such as ``warnings``.
        priority: higher goes first.
        idempotency: key of the client; the same key is the same job.
        body_hash: hash of the request's body.
        retry_count: number of this repetition by the client's own count. Above 0, a job of the last
            ten minutes with the same `body_hash` is returned in place of a new one.
        parent: id of the job that this one continues or repeats.
        max_queued: `QueueFullError` if this many jobs are queued already.
        max_queued_of_owner: the same for this owner's jobs.
    """

    request: Mapping[str, Any]
    owner: str = ""
    model: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    idempotency: str | None = None
    body_hash: str | None = None
    retry_count: int = 0
    parent: str | None = None
    max_queued: int | None = None
    max_queued_of_owner: int | None = None


@dataclass(frozen=True)
class Job:
    """A job of the queue. Times are seconds since the epoch.

    Attributes:
        seq: number in order of arrival.
        status: one of `STATUSES`.
        owner, model, request, resolved, priority, parent: as in `NewJob`.
        group: device group that runs it or ran it last.
        expires_at: when its files are deleted; None for never.
        attempts: starts since it last advanced; each may have killed a worker.
        interruptions: deaths of the server while it wrote the job's frames.
        progress: percent, over all stages; 100 only when completed.
        phase: the current stage, of which `step` of `total_steps` are done.
        eta_s: forecast of the remaining seconds.
        run: path of its run folder; None before it has one.
        error: ``{"code", "message"}`` of a failed job.
        file: path of its video, relative to the data folder.
        report: what its run reports: ``warnings``, ``repairs``, ``checks``, ``stage_durations``,
            ``inference_time_s``, ``peak_memory_mb``, ``resumed_from_step``.
        is_cancel_requested: whether a client cancelled it while it ran.
    """

    seq: int
    id: str
    status: str
    priority: int
    owner: str
    model: str
    group: str | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    expires_at: float | None
    attempts: int
    interruptions: int
    request: dict[str, Any]
    resolved: dict[str, Any]
    report: dict[str, Any]
    progress: int
    phase: str | None
    step: int | None
    total_steps: int | None
    eta_s: float | None
    run: str | None
    error: dict[str, Any] | None
    file: str | None
    body_hash: str | None
    idempotency: str | None
    is_cancel_requested: bool
    parent: str | None

    @property
    def is_final(self) -> bool:
        """Whether it is completed, failed or cancelled."""
        return self.status in FINAL

    def as_damaged(self, why: str) -> Job:
        """This job as a failed one, whose row can't be read."""
        text = (
            f"the queue's row of this video can't be read ({why}); was it changed by hand? Mend it "
            "and retry the video, or delete the video"
        )
        error = {"code": "damaged_row", "message": text}
        request: dict[str, Any] = {"seed": 0}
        return replace(self, status="failed", request=request, resolved={}, report={}, error=error)


@dataclass(frozen=True)
class StoredEvent:
    """An event of a job; `number` grows over all jobs and is the ``Last-Event-ID``."""

    number: int
    video: str
    owner: str
    type: str
    data: dict[str, Any]
    at: float
