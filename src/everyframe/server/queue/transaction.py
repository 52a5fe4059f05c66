"""Transaction on the queue's tables, with its new events; and rows as `Job` and `StoredEvent`."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from everyframe.core.errors import NoSuchVideoError
from everyframe.server.queue.database import Database
from everyframe.server.queue.jobs import Job, StoredEvent

#: Maximum number of stored events; the oldest are deleted first.
MAX_EVENTS = 20_000
#: Seconds after which the events of a finished job are deleted.
EVENT_SECONDS = 86_400.0
#: Events between two deletions of old ones.
_PRUNE_EVERY = 500

_JSON = frozenset({"request", "resolved", "report", "error"})
_COLUMNS = tuple(field.name for field in fields(Job))


class Transaction:
    """Context: a transaction; `announce` gets its events once they are written."""

    def __init__(
        self,
        database: Database,
        announce: Callable[[list[StoredEvent]], None],
        *,
        is_durable: bool = True,
    ) -> None:
        self._announce = announce
        self._events: list[StoredEvent] = []
        self._transaction = database.write(is_durable=is_durable)

    def __enter__(self) -> Transaction:
        self.connection = self._transaction.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._transaction.__exit__(*error)
        if error[0] is None and self._events:
            self._announce(self._events)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Context: an error undoes the block, with its events, and passes through."""
        num_events = len(self._events)
        self.connection.execute("SAVEPOINT one")
        try:
            yield
        except BaseException:
            del self._events[num_events:]
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK TO one")
            raise
        finally:
            if self.connection.in_transaction:
                self.connection.execute("RELEASE one")

    def set(self, id: str, values: Mapping[str, Any]) -> sqlite3.Row:  # noqa: A002
        """Set these fields of a job and return its row. Raises `NoSuchVideoError` without one."""
        if values:
            setting = ", ".join(f'"{name}" = ?' for name in values)
            query = f"UPDATE videos SET {setting} WHERE id = ? RETURNING *"
        else:
            query = "SELECT * FROM videos WHERE id = ?"
        row: sqlite3.Row | None = self.connection.execute(query, (*plain(values), id)).fetchone()
        if row is None:
            raise NoSuchVideoError(id)
        return row

    def job(self, row: sqlite3.Row, type: str, data: Mapping[str, Any]) -> Job:  # noqa: A002
        """Add an event of a row's job, and return the job."""
        self.event(row["id"], row["owner"], type, data)
        return job_of(row)

    def event(self, id: str, owner: str, type: str, data: Mapping[str, Any]) -> int:  # noqa: A002
        """Add an event and return its number."""
        row = self.connection.execute(
            "INSERT INTO events(video, owner, type, data, at) VALUES (?, ?, ?, ?, ?) RETURNING *",
            (id, owner, type, _text(data), time.time()),
        ).fetchone()
        event = event_of(row)
        self._events.append(event)
        if event.number % _PRUNE_EVERY == 0:
            _prune(self.connection, event)
        return event.number


def _prune(connection: sqlite3.Connection, newest: StoredEvent) -> None:
    """Delete the oldest events, and those of jobs that finished long ago."""
    connection.execute("DELETE FROM events WHERE number <= ?", (newest.number - MAX_EVENTS,))
    connection.execute(
        "DELETE FROM events WHERE at < ? AND video NOT IN "
        "(SELECT id FROM videos WHERE status IN ('queued', 'in_progress'))",
        (newest.at - EVENT_SECONDS,),
    )


def plain(values: Mapping[str, Any]) -> list[Any]:
    """Values of columns in SQLite's types."""
    return [
        _text(value) if name in _JSON and value is not None else value
        for name, value in values.items()
    ]


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def job_of(row: sqlite3.Row) -> Job:
    """The job of a row; `Job.as_damaged` if somebody wrote what is no JSON object into it."""
    values = {name: row[name] for name in _COLUMNS}
    damaged = None
    for name in _JSON:
        if values[name] is not None and (found := _object(values[name])) is None:
            damaged = name
        elif values[name] is not None:
            values[name] = found
    values["is_cancel_requested"] = bool(values["is_cancel_requested"])
    if damaged is None:
        return Job(**values)
    return Job(**values).as_damaged(f"{damaged} is no JSON object")


def event_of(row: sqlite3.Row) -> StoredEvent:
    """The event of a row; a note if somebody wrote what is no JSON object into it."""
    data = _object(row["data"])
    if data is None:
        note = {"text": f"the queue's row of a {row['type']} event was changed by hand"}
        return StoredEvent(**{**dict(row), "type": "note", "data": note})
    return StoredEvent(**{**dict(row), "data": data})


def _object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a text; None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
