"""Follow the events of all jobs in a thread, for metrics and traces."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from everyframe.core.errors import StoreError
from everyframe.server.queue.jobs import Job, StoredEvent
from everyframe.server.queue.store import JobStore

#: Called with each event, and with its job if that is still there.
Follower = Callable[[StoredEvent, "Job | None"], None]

#: Seconds of a wait for events, and events that are read at once.
_PAUSE, _CHUNK = 0.5, 500
#: Seconds after events in which others come, so that a job's are read together.
_GATHER = 0.05
_log = logging.getLogger(__name__)


class JobFollower:
    """Calls functions with every event from now on, in a thread; `stop` ends it."""

    def __init__(self, store: JobStore, followers: Sequence[Follower]) -> None:
        self._store, self._followers = store, followers
        self._after = store.last_event
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job follower", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the events that already exist."""
        self._stopped.set()
        self._store.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            is_last = self._stopped.is_set()
            try:
                self._store.wait(self._after, _PAUSE, self._stopped.is_set)
                events = self._store.events(after=self._after, limit=_CHUNK)
                for event in events:
                    job = self._store.get(event.video)
                    for follow in self._followers:
                        follow(event, job)
                    self._after = event.number
            except StoreError as error:
                _log.warning("events are not followed: %s", error)
                self._stopped.wait(_PAUSE)
                events = []
            if is_last and not events:
                return
            self._stopped.wait(_GATHER)
