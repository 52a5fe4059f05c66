"""Retention: finished jobs whose time has come are deleted, and uploads that no job names."""

from __future__ import annotations

import time

from everyframe.server.queue.store import JobStore

#: Seconds between two looks.
CLEAN_SECONDS = 30.0
#: Seconds after its last use for which an upload stays, whether or not a job names it.
_UPLOAD_SECONDS = 3600.0


def clean(store: JobStore) -> None:
    """Delete expired jobs, and uploads that nobody gave lately and no job names.

    Raises `StoreError` or `OSError` if the data folder can't be read or written.
    """
    now = time.time()
    for job in store.expired(now):
        store.delete(job.id)
    store.folder.remove_inputs(store.inputs(), before=now - _UPLOAD_SECONDS)
