"""Retention: finished jobs whose time has come are deleted, and uploads that no job names."""

from __future__ import annotations

import threading
import time

from everyframe.server.store import JobStore

#: Seconds between two looks.
_PAUSE = 30.0
#: Seconds after its last use for which an upload stays, whether or not a job names it.
_UPLOAD_SECONDS = 3600.0


class Cleaner:
    """Deletes what has expired; cheap to call often, from any thread."""

    def __init__(self, store: JobStore, pause: float = _PAUSE) -> None:
        self._store = store
        self._pause = pause
        self._next = 0.0
        self._lock = threading.Lock()

    def clean(self) -> None:
        """Delete expired jobs and unused uploads, if the last look was a while ago."""
        with self._lock:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._pause
            now = time.time()
            for job in self._store.expired(now):
                self._store.delete(job.id)
            self._store.folder.remove_inputs(self._store.inputs(), before=now - _UPLOAD_SECONDS)
