"""Insert a job into the queue's table, once per request, within the limits of the queue."""

from __future__ import annotations

import sqlite3
import time
import uuid

from everyframe.core.errors import InputError, QueueFullError
from everyframe.core.limits import random_seed
from everyframe.server.queue.jobs import Job, NewJob
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
            _check_room(changes.connection, job)
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


def _check_room(connection: sqlite3.Connection, job: NewJob) -> None:
    if job.max_queued is None and job.max_queued_of_owner is None:
        return
    query = "SELECT count(*), coalesce(sum(owner = ?), 0) FROM videos WHERE status = 'queued'"
    queued, own = connection.execute(query, (job.owner,)).fetchone()
    for number, limit, whose in (
        (queued, job.max_queued, ""),
        (own, job.max_queued_of_owner, " of this key"),
    ):
        if limit is not None and number >= limit:
            raise QueueFullError(
                f"the queue is full: {number} jobs{whose} wait, at most {limit} may; try again "
                "later"
            )
