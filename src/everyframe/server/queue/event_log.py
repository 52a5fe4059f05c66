"""Event log of all jobs: events in the database, and callbacks for new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from everyframe.server.queue.database import Database
from everyframe.server.queue.jobs import StoredEvent
from everyframe.server.queue.transaction import Transaction, event_of


class EventLog:
    """The events of all jobs, in one order. All methods are thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changed = threading.Condition()
        self._listeners: list[Callable[[StoredEvent], None]] = []
        with database.read() as reading:
            row = reading.execute("SELECT max(number) FROM events").fetchone()
        self._last_event = int(row[0] or 0)

    def events(
        self,
        *,
        after: int = 0,
        video: str | None = None,
        owner: str | None = None,
        limit: int = 1000,
    ) -> list[StoredEvent]:
        """Events after that number, of one job or of all, in order."""
        where = "number > ?"
        values: tuple[Any, ...] = (after,)
        for name, value in (("video", video), ("owner", owner)):
            if value is not None:
                where, values = f"{where} AND {name} = ?", (*values, value)
        query = f"SELECT * FROM events WHERE {where} ORDER BY number LIMIT ?"
        with self._database.read() as reading:
            return [event_of(row) for row in reading.execute(query, (*values, limit))]

    @property
    def last_event(self) -> int:
        """Number of the newest event; 0 without one."""
        return self._last_event

    def wait(self, after: int, timeout: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait for an event after that number, for at most `timeout` seconds.

        Also returns once `is_over` is true, which `wake` has checked again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._last_event > after or is_over(), timeout)

    def wake(self) -> None:
        """Have all waiting threads check their `is_over`."""
        with self._changed:
            self._changed.notify_all()

    def listen(self, listener: Callable[[StoredEvent], None]) -> Callable[[], None]:
        """Call `listener` with each new event, in the thread that added it; the result ends that.

        It is called after the event is written, must not raise and must not block.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _writing(self, *, is_durable: bool = True) -> Transaction:
        """A transaction whose events are announced once they are written."""
        return Transaction(self._database, self._announce, is_durable=is_durable)

    def _announce(self, events: list[StoredEvent]) -> None:
        with self._changed:
            self._last_event = max(self._last_event, events[-1].number)
            self._changed.notify_all()
        for listener in tuple(self._listeners):
            for event in events:
                listener(event)
