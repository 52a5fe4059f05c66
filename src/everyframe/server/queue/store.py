"""The durable queue: jobs and their events in one SQLite file.

Each method is one transaction, and on disk when it returns. Only `claim`, `claim_alike` and
`update` don't wait for the disk: after a power cut a running job may be queued again, and continues
with its run as after any other death of the server. The state of the videos is in their run
folders; `dispatcher.py` runs the jobs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from everyframe.core.errors import InputError, StoreError
from everyframe.server.data_folder import DataFolder
from everyframe.server.queue.database import VERSION, Database, is_full
from everyframe.server.queue.event_log import EventLog
from everyframe.server.queue.jobs import FINAL, STATUSES, Job, NewJob
from everyframe.server.queue.row_insertion import insert_job, retry_job
from everyframe.server.queue.transaction import Transaction, job_of, plain

# A method of the store is called `list`.
_Jobs: TypeAlias = list[Job]
_Added: TypeAlias = list[Job | Exception]

#: Deaths of the server in a row, without a step between them, after which a job fails.
MAX_INTERRUPTIONS = 10

#: SQLite refuses a query for all rows if one of them, changed by hand, holds no JSON.
_VALID_REQUEST = "iif(json_valid(request), request, '{}')"

#: Fields that `update` may set.
_CHANGEABLE = frozenset({
    "attempts", "error", "eta_s", "file", "interruptions", "phase", "progress",
    "report", "resolved", "run", "started_at", "step", "total_steps",
})  # fmt: skip


class JobStore(EventLog):
    """Jobs and events of one data folder. All methods are thread-safe.

    Every method raises `StoreError` if the file can't be read or written.

    Attributes:
        retention_seconds: time after which a job that ended expires; None for never.
    """

    def __init__(self, folder: DataFolder, retention_seconds: float | None = None) -> None:
        super().__init__(Database(folder.database, may_be_new=not folder.has_jobs()))
        self.folder = folder
        self.retention_seconds = retention_seconds

    def add(self, job: NewJob) -> Job:
        """Add a job to the queue, or return the job that the same request made before.

        Two requests of an owner are the same if their idempotency keys are equal, or if the client
        marks one as a repetition of an equal body within `row_insertion.REPEAT_SECONDS`.

        Raises:
            InputError: the idempotency key was used for another request.
            QueueFullError: the queue is full.
        """
        (added,) = self.add_all([job])
        if isinstance(added, Exception):
            raise added
        return added

    def add_all(self, jobs: Sequence[NewJob]) -> _Added:
        """Add jobs in order with one flush to disk; returns the job of each, or its error.

        A job that can't be added leaves nothing behind and does not affect the others.
        """
        try:
            with self._writing() as changes:
                return [insert_job(changes, job) for job in jobs]
        except StoreError as error:
            if len(jobs) == 1:
                return [error]
        # Not even one of them was written. Some may fit on a disk that is full for all.
        return [each for job in jobs for each in self.add_all([job])]

    def get(self, id: str, owner: str | None = None) -> Job | None:  # noqa: A002
        """The job; None if it does not exist, or belongs to another owner than `owner`."""
        with self._database.read() as reading:
            row = reading.execute("SELECT * FROM videos WHERE id = ?", (id,)).fetchone()
        return None if row is None or owner not in (None, row["owner"]) else job_of(row)

    def list(
        self,
        *,
        limit: int = 20,
        after: str | None = None,
        order: str = "desc",
        statuses: Collection[str] = (),
        owner: str | None = None,
    ) -> _Jobs:
        """Jobs in order of arrival, newest first for ``desc``, beginning after the job `after`.

        Raises:
            InputError: `order` or `statuses` is wrong, or `after` is no job of this owner.
        """
        if order not in ("asc", "desc"):
            raise InputError(f"order must be asc or desc, got {order!r}")
        if unknown := [each for each in statuses if each not in STATUSES]:
            raise InputError(f"status must be one of {', '.join(STATUSES)}, got {unknown[0]!r}")
        where = "1"
        values: tuple[Any, ...] = ()
        if owner is not None:
            where, values = "owner = ?", (owner,)
        if statuses:
            where += f" AND status IN ({', '.join('?' * len(statuses))})"
            values = (*values, *statuses)
        if after is not None:
            last = self.get(after, owner)
            if last is None:
                raise InputError(f"after must be the id of a video, got {after!r}")
            where += " AND seq > ?" if order == "asc" else " AND seq < ?"
            values = (*values, last.seq)
        query = f"SELECT * FROM videos WHERE {where} ORDER BY seq {order} LIMIT ?"
        with self._database.read() as reading:
            return [job_of(row) for row in reading.execute(query, (*values, limit))]

    def count(self, owner: str | None = None) -> dict[str, int]:
        """Number of jobs by status, with an entry for each."""
        where, values = ("WHERE owner = ?", (owner,)) if owner is not None else ("", ())
        query = f"SELECT status, count(*) FROM videos {where} GROUP BY status"
        with self._database.read() as reading:
            found = {row[0]: row[1] for row in reading.execute(query, values)}
        return {status: found.get(status, 0) for status in STATUSES}

    def queue_position(self, job: Job) -> int | None:
        """Number of queued jobs before this one; None for a job that is not queued."""
        if job.status != "queued":
            return None
        query = (
            "SELECT count(*) FROM videos WHERE status = 'queued' "
            "AND (priority > ? OR (priority = ? AND seq < ?))"
        )
        with self._database.read() as reading:
            return int(reading.execute(query, (job.priority, job.priority, job.seq)).fetchone()[0])

    def has_older(self, job: Job) -> bool:
        """Whether an older job of the same priority is queued."""
        query = "SELECT 1 FROM videos WHERE status = 'queued' AND priority = ? AND seq < ? LIMIT 1"
        with self._database.read() as reading:
            return reading.execute(query, (job.priority, job.seq)).fetchone() is not None

    def claim(self, group: str, prefers: str | None = None) -> Job | None:
        """Begin the next queued job in this device group, by priority, then age; None without one.

        Among jobs of equal priority those of the model `prefers` go first. A job with a run
        continues in the group that began it.
        """
        if not self.count()["queued"]:
            return None
        which = (
            "SELECT seq FROM videos WHERE status = 'queued' AND (run IS NULL OR \"group\" IS NULL "
            'OR "group" = ?) ORDER BY priority DESC, model IS NOT ?, seq LIMIT 1'
        )
        return self._begin(group, which, (group, prefers or ""))

    def claim_alike(
        self,
        group: str,
        job: Job,
        excluded: Collection[str] = (),
        *,
        may_jump: bool = True,
    ) -> Job | None:
        """Begin the next new job that differs from `job` in prompt and seed only; None without one.

        None also while a job of higher priority waits, and, unless it `may_jump`, while an older
        one waits. Jobs whose ids are in `excluded` are left out.
        """
        others = ", ".join("?" * len(excluded))
        own = "json_remove({}, '$.prompt', '$.negative_prompt', '$.seed')"
        first = "" if may_jump else "AND seq = (SELECT min(seq) FROM first) "
        which = (
            "WITH first AS (SELECT * FROM videos WHERE status = 'queued' AND priority = "
            "(SELECT max(priority) FROM videos WHERE status = 'queued')) "
            "SELECT seq FROM first WHERE run IS NULL AND attempts = 0 AND model = ? "
            f"AND {own.format(_VALID_REQUEST)} = {own.format('?')} {first}AND id NOT IN ({others}) "
            "ORDER BY seq LIMIT 1"
        )
        request = plain({"request": dict(job.request)})[0]
        return self._begin(group, which, (job.model, request, *excluded))

    def _begin(self, group: str, which: str, values: tuple[Any, ...]) -> Job | None:
        """Begin the job whose `seq` the query finds; None without one."""
        query = (
            "UPDATE videos SET status = 'in_progress', \"group\" = ?, attempts = attempts + 1, "
            "started_at = coalesce(started_at, ?), error = NULL, phase = NULL, step = NULL, "
            f"total_steps = NULL WHERE seq = ({which}) RETURNING *"
        )
        with self._writing(is_durable=False) as changes:
            values = (group, time.time(), *values)
            while row := changes.connection.execute(query, values).fetchone():
                job = job_of(row)
                if not job.is_final:
                    return changes.job(row, "status", {"status": "in_progress"})
                ended = changes.set(job.id, {**self._end(job.status), "error": job.error})
                changes.job(ended, "done", {"status": job.status})
            return None

    def update(
        self,
        id: str,  # noqa: A002
        *,
        event: tuple[str, Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> Job:
        """Set fields of a job, and add an event of (type, data) with them.

        Raises:
            NoSuchVideoError: there is no such job.
        """
        assert _CHANGEABLE.issuperset(values), values
        with self._writing(is_durable=False) as changes:
            row = changes.set(id, values)
            return changes.job(row, *event) if event is not None else job_of(row)

    def finish(
        self,
        id: str,  # noqa: A002
        status: str,
        *,
        error: Mapping[str, Any] | None = None,
        file: str | None = None,
        **values: Any,
    ) -> Job:
        """End a job as ``completed`` (with its file), ``failed`` (with its error) or ``cancelled``.

        `values` are fields of `update`. Raises `NoSuchVideoError` if there is no such job.
        """
        assert status in FINAL, status
        values |= {**self._end(status), "error": error, "eta_s": None}
        if status == "completed":
            values |= {"progress": 100, "file": file, "phase": None}
        with self._writing() as changes:
            row = changes.set(id, values)
            return changes.job(row, "done", {"status": status})

    def requeue(
        self,
        id: str,  # noqa: A002
        *,
        counts_attempt: bool,
        cause: str = "",
        **values: Any,
    ) -> Job:
        """Put a running job back into the queue, at its old place and with its run.

        Its event names the `cause`, such as ``worker_died``. A job whose cancellation was requested
        is cancelled instead. Its last start counts as an attempt only with `counts_attempt`. Raises
        `NoSuchVideoError` if there is no such job.
        """
        values |= {"status": "queued", "eta_s": None}
        with self._writing() as changes:
            row = changes.set(id, values)
            if not counts_attempt:
                row = changes.set(id, {"attempts": max(row["attempts"] - 1, 0)})
            if row["is_cancel_requested"]:
                return self._cancel(changes, id)
            data = {"status": "queued", "cause": cause} if cause else {"status": "queued"}
            return changes.job(row, "status", data)

    def retry(
        self,
        id: str,  # noqa: A002
        max_queued: int | None = None,
        max_queued_of_owner: int | None = None,
    ) -> Job:
        """Put a failed or cancelled job back into the queue, with its run and no counted attempts.

        Raises:
            NoSuchVideoError: there is no such job.
            QueueFullError: that many jobs, or jobs of its owner, are queued already.
            VideoStatusError: it is neither failed nor cancelled.
        """
        with self._writing() as changes:
            return retry_job(changes, id, max_queued, max_queued_of_owner)

    def request_cancel(self, id: str) -> Job:  # noqa: A002
        """Cancel a queued job at once; mark a running job, which `Dispatcher.cancel` stops.

        A finished job stays as it is. Raises `NoSuchVideoError` if there is no such job.
        """
        with self._writing() as changes:
            row = changes.set(id, {})
            if row["status"] in FINAL:
                return job_of(row)
            row = changes.set(id, {"is_cancel_requested": 1})
            if row["status"] == "in_progress":
                return job_of(row)
            return self._cancel(changes, id)

    def delete(self, id: str) -> bool:  # noqa: A002
        """Delete a job, its events, then its files; False if it is running or does not exist.

        On a full disk its files are deleted first: that the job is gone needs room as well.
        """
        try:
            return self._delete(id)
        except StoreError as error:
            job = self.get(id) if is_full(error) else None
            if job is None or job.status == "in_progress":
                raise
            self.folder.remove(id)
            return self._delete(id)

    def _delete(self, id: str) -> bool:  # noqa: A002
        with self._writing() as changes:
            query = "DELETE FROM videos WHERE id = ? AND status != 'in_progress' RETURNING owner"
            row = changes.connection.execute(query, (id,)).fetchone()
            if row is None:
                return False
            changes.connection.execute("DELETE FROM events WHERE video = ?", (id,))
            changes.event(id, row["owner"], "deleted", {})
        self.folder.remove(id)
        return True

    def keep_groups(self, groups: Collection[str]) -> None:
        """Let any group continue jobs whose group is not among these."""
        marks = ", ".join("?" * len(groups))
        query = f'UPDATE videos SET "group" = NULL WHERE "group" NOT IN ({marks})'
        with self._database.write() as writing:
            writing.execute(query, (*groups,))

    def inputs(self) -> set[str]:
        """Paths of the uploads that jobs use, relative to the data folder."""
        query = f"SELECT value FROM videos, json_each({_VALID_REQUEST}) WHERE value LIKE 'inputs/%'"
        with self._database.read() as reading:
            return {str(row[0]) for row in reading.execute(query)}

    def expired(self, now: float) -> _Jobs:
        """Finished jobs that have expired."""
        query = "SELECT * FROM videos WHERE expires_at <= ? AND status NOT IN (?, ?)"
        with self._database.read() as reading:
            rows = reading.execute(query, (now, "queued", "in_progress"))
            return [job_of(row) for row in rows]

    def recover(self) -> _Jobs:
        """Requeue every job that was running when the server died, and return those jobs.

        A job whose files are complete is completed. A job that was to be cancelled is cancelled. A
        job fails if its frames were being written at each of `MAX_INTERRUPTIONS` deaths in a row:
        at other times the server only waits for a worker, and the job can't have killed it. Files
        that belong to no job are deleted.

        Call it before any job is claimed, while the data folder is locked: every job that counts as
        running is then one of a dead server.
        """
        back = []
        for job in self.list(limit=-1, order="asc", statuses=("in_progress",)):
            done, has_frames = self.folder.published(job.id), self.folder.has_frames(job.id)
            # A run that was begun at the last moment is one that the row does not know.
            run = self.folder.saved_run_path(job.id)
            if done is not None:
                self.finish(job.id, "completed", **done)
            elif job.is_final:
                self.finish(job.id, job.status, error=job.error, run=run)
            elif job.is_cancel_requested:
                self.finish(job.id, "cancelled", run=run)
            elif (deaths := job.interruptions + has_frames) >= MAX_INTERRUPTIONS:
                text = f"the server died {MAX_INTERRUPTIONS} times while it made this video"
                error = {"code": "server_died", "message": text}
                self.finish(job.id, "failed", error=error, run=run)
            else:
                back.append(self.requeue(
                    job.id, counts_attempt=False, cause="server_died", interruptions=deaths,
                    run=run))  # fmt: skip
        with self._database.read() as reading:
            ids = {row[0]: row[1] for row in reading.execute("SELECT id, status FROM videos")}
        self.folder.sweep(ids, [each for each, status in ids.items() if status == "completed"])
        return back

    def is_writable(self) -> bool:
        """Whether the file can be written now; `StoreError` says why not."""
        with self._database.write() as writing:
            # What it is already; a page of the file is written nevertheless.
            writing.execute(f"PRAGMA user_version={VERSION}")
        return True

    def close(self) -> None:
        """Close the file; threads in `wait` return at their timeout."""
        self._database.close()

    def _cancel(self, changes: Transaction, id: str) -> Job:  # noqa: A002
        """End a job that is not running as cancelled."""
        row = changes.set(id, self._end("cancelled"))
        return changes.job(row, "done", {"status": "cancelled"})

    def _end(self, status: str) -> dict[str, Any]:
        """Fields of a job that ends now."""
        now, kept = time.time(), self.retention_seconds
        expires = None if kept is None else now + kept
        return {"status": status, "completed_at": now, "expires_at": expires}
