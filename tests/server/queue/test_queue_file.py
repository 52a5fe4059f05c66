"""The file of the queue is missing, removed while it is served, or used by another program."""

from __future__ import annotations

import sqlite3

import pytest

from everyframe.core.errors import StoreError
from everyframe.server.data_folder import DataFolder
from everyframe.server.queue.jobs import NewJob
from everyframe.server.queue.store import JobStore

ID = "video_" + "ab" * 16


def test_a_lost_queue_costs_no_video(folder: DataFolder) -> None:
    """A new queue knows none of them, and files of unknown jobs are deleted at the start."""
    folder.new_video(ID)
    folder.publish(ID, {"file": "x"})
    for text in (b"", None):
        folder.database.unlink() if text is None else folder.database.write_bytes(text)
        for _ in range(2):  # nor is there a new queue afterwards
            with pytest.raises(StoreError, match=r"is missing or empty, .* put the queue back"):
                JobStore(folder)
    assert folder.published(ID) == {"file": "x"}
    folder.remove(ID)
    JobStore(folder).close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_no_job_goes_into_a_file_that_was_removed(
    store: JobStore, folder: DataFolder, is_replaced: bool
) -> None:
    """SQLite would write it, and the answer be that the job is on disk."""
    moved = folder.database.rename(folder.path / "moved")
    if is_replaced:
        folder.database.touch()
    for ask in (lambda: store.add(NewJob({"prompt": "x"})), store.count, store.is_writable):
        with pytest.raises(StoreError, match="removed or replaced while it was served"):
            ask()
    assert folder.database.exists() == is_replaced
    moved.replace(folder.database)
    assert store.add(NewJob({"prompt": "x"})).status == "queued"


def test_another_program_that_uses_the_file_is_named(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(folder)
    store._database._writer.execute("PRAGMA busy_timeout=0")
    other = sqlite3.connect(folder.database, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match=r"locked\); end the other program that uses it"):
        store.add(NewJob({"prompt": "x"}))
    other.close()
    store.close()
