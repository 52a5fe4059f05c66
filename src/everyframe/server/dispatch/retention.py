"""Retention: delete expired jobs, and files that belong to no job."""

from __future__ import annotations

import time

from everyframe.server.data_folder import is_video_id
from everyframe.server.queue.store import JobStore

#: Seconds between two looks.
CLEAN_SECONDS = 30.0
#: Seconds after its last use for which an upload stays, whether or not a job names it.
_UPLOAD_SECONDS = 3600.0


def clean(store: JobStore) -> None:
    """Delete expired jobs, old uploads that no job uses, and run folders without a job.

    Raises `StoreError` or `OSError` if the data folder can't be read or written.
    """
    now = time.time()
    for job in store.expired(now):
        store.delete(job.id)
    # A run that was stopped in the middle of a long step may write after its job was deleted. A
    # job is in the queue before it has a folder, so these are of none that is to come.
    for id in [path.name for path in store.folder.runs.iterdir()]:  # noqa: A001
        if is_video_id(id) and store.get(id) is None:
            store.folder.remove_runs(id)
    store.folder.remove_inputs(store.inputs(), before=now - _UPLOAD_SECONDS)
