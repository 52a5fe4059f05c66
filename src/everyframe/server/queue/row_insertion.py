"""Queue a job, once per request, or queue it again, within the limits of the queue."""

from __future__ import annotations

import sqlite3
import time
import uuid

from everyframe.core.errors import InputError, QueueFullError, VideoStatusError
from everyframe.core.limits import random_seed
from everyframe.server.queue.jobs import RETRIED, Job, NewJob
from everyframe.server.queue.transaction import Transaction, job_of, plain

#: Seconds in which a client may repeat a request whose answer was lost.
REPEAT_SECONDS = 600.0


def insert_job(changes: Transaction, job: NewJob) -> Job | Exception:
    """The inserted job, the job that this request made before, or the error that prevents it."""
    try:
        with changes.savepoint():
            same = _same_job(changes.connection, job)
            if same is not None:
                return same
            _check_room(changes, job.owner, job.max_queued, job.max_queued_of_owner)
            request = dict(job.request)
            if request.get("seed") is None:
                request["seed"] = random_seed()
            values = {
                "id": f"video_{uuid.uuid4().hex}", "status": "queued", "priority": job.priority,
                "owner": job.owner, "model": job.model, "created_at": time.time(),
                "request": request, "resolved": dict(job.resolved), "report": dict(job.report),
                "body_hash": job.body_hash, "idempotency": job.idempotency, "parent": job.parent,
            }  # fmt: skip
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            added = changes.connection.execute(
                f"INSERT INTO videos({names}) VALUES ({marks}) RETURNING *", plain(values)
            ).fetchone()
            return changes.job(added, "status", {"status": "queued"})
    except sqlite3.Error:  # SQLite may have undone the whole transaction
        raise
    except Exception as error:  # noqa: BLE001 - it is this job's, and the others continue
        return error


def retry_job(
    changes: Transaction,
    id: str,  # noqa: A002
    max_queued: int | None,
    max_queued_of_owner: int | None,
) -> Job:
    """Queue a job that has ended without a video; see `JobStore.retry`."""
    # Read and written at once: of two that retry it, one finds it queued.
    row = changes.set(id, {})
    if row["status"] not in RETRIED:
        raise VideoStatusError(
            f"only a failed or cancelled video can be retried; {id} is {row['status']}"
        )
    _check_room(changes, row["owner"], max_queued, max_queued_of_owner)
    values = {"status": "queued", "attempts": 0, "interruptions": 0, "is_cancel_requested": 0,
              "error": None, "completed_at": None, "expires_at": None}  # fmt: skip
    return changes.job(changes.set(id, values), "status", {"status": "queued"})


def _same_job(connection: sqlite3.Connection, job: NewJob) -> Job | None:
    """The job that the same request made before; None if it is new."""
    if job.idempotency is not None:
        query = "SELECT * FROM videos WHERE owner = ? AND idempotency = ?"
        row = connection.execute(query, (job.owner, job.idempotency)).fetchone()
        if row is not None and row["body_hash"] != job.body_hash:
            raise InputError(
                f"the idempotency key {job.idempotency!r} was used for another request; "
                "give each request a key of its own"
            )
        return row and job_of(row)
    if job.retry_count <= 0 or job.body_hash is None:
        return None
    query = (
        "SELECT * FROM videos WHERE owner = ? AND body_hash = ? AND created_at > ? "
        "ORDER BY seq DESC LIMIT 1"
    )
    since = time.time() - REPEAT_SECONDS
    row = connection.execute(query, (job.owner, job.body_hash, since)).fetchone()
    return row and job_of(row)


def _check_room(
    changes: Transaction, owner: str, max_queued: int | None, max_queued_of_owner: int | None
) -> None:
    """Raise `QueueFullError` if one more queued job of this owner is too many."""
    if max_queued is None and max_queued_of_owner is None:
        return
    query = "SELECT count(*), coalesce(sum(owner = ?), 0) FROM videos WHERE status = 'queued'"
    queued, own = changes.connection.execute(query, (owner,)).fetchone()
    for number, limit, whose in (
        (queued, max_queued, ""),
        (own, max_queued_of_owner, " of this key"),
    ):
        if limit is not None and number >= limit:
            raise QueueFullError(
                f"the queue is full: {number} jobs{whose} wait, at most {limit} may; try again "
                "later"
            )
