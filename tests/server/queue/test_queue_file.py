"""The file of the queue is missing, removed while it is served, or used by another program."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import StoreError
from everyframe.server.data_folder import DataFolder
from everyframe.server.http.resources import video_resource
from everyframe.server.queue.database import Database, _explained
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


@pytest.mark.parametrize("is_final", [False, True])
def test_deletion_frees_room_on_a_full_disk(
    store: JobStore, folder: DataFolder, monkeypatch: pytest.MonkeyPatch, is_final: bool
) -> None:
    """The queue's log grows by a deletion, and what the job holds may fill the disk."""
    job = store.add(NewJob({"prompt": "x"}))
    folder.new_video(job.id)
    folder.publish(job.id, {})
    store.claim("default")
    write = store._database.write

    @contextmanager
    def write_if_there_is_room(**values: Any) -> Iterator[sqlite3.Connection]:
        if folder.video(job.id).exists():
            with _explained(folder.database):
                raise sqlite3.OperationalError("database or disk is full")
        with write(**values) as connection:
            yield connection

    if is_final:
        store.finish(job.id, "completed")
    monkeypatch.setattr(store._database, "write", write_if_there_is_room)
    if is_final:
        assert store.delete(job.id)
        assert store.get(job.id) is None
        return
    with pytest.raises(StoreError, match="free some space on its disk"):
        store.delete(job.id)
    assert folder.video(job.id).exists(), "a running job keeps its files"


@pytest.mark.skipif(sys.platform == "win32", reason="its paths have another limit")
@pytest.mark.parametrize("length", [504, 505])
def test_a_path_that_is_too_long_for_sqlite_is_reported_as_that(
    tmp_path: Path, length: int
) -> None:
    left = length - len("/jobs.sqlite") - len(str(tmp_path))
    names = ["d" * 99] * (left // 100 - 1)
    place = tmp_path.joinpath(*names, "d" * (left - 100 * len(names) - 1))
    place.mkdir(parents=True)
    path = place / "jobs.sqlite"
    assert len(str(path)) == length
    if length > 504:
        with pytest.raises(StoreError, match=r"give a shorter --data-dir: .* 504 bytes at most"):
            Database(path)
    else:
        Database(path).close()


@pytest.mark.parametrize(
    ("column", "text"),
    [("request", "{bad"), ("request", "[1]"), ("report", ""), ("resolved", "[" * 100_000)],
)
def test_a_row_that_was_changed_by_hand_is_one_failed_job(
    store: JobStore, column: str, text: str
) -> None:
    bad, good, other = (store.add(NewJob({"prompt": "x"}, model="m")) for _ in range(3))
    with store._database.write() as writing:
        writing.execute(f"UPDATE videos SET {column} = ? WHERE id = ?", (text, bad.id))
    shown = store.list(order="asc")
    assert [job.status for job in shown] == ["failed", "queued", "queued"]
    assert [video_resource(job)["status"] for job in shown] == ["failed", "queued", "queued"]
    assert store.inputs() == set()
    begun = store.claim("default")
    assert begun is not None
    assert begun.id == good.id
    # Nor does it end the batch, which compares what was asked for.
    alike = store.claim_alike("default", begun)
    assert alike is not None
    assert alike.id == other.id
    found = store.get(bad.id)
    assert found is not None
    assert found.error is not None
    assert f"{column} is no JSON object" in found.error["message"]
    assert store.count()["failed"] == 1
    assert [event.type for event in store.events(video=bad.id)] == ["status", "done"]
    assert store.delete(bad.id)


def test_a_batch_passes_over_a_row_that_was_changed_by_hand(store: JobStore) -> None:
    first, bad, other = (store.add(NewJob({"prompt": "x"}, model="m")) for _ in range(3))
    assert store.claim("default") is not None
    with store._database.write() as writing:
        writing.execute("UPDATE videos SET request = '{bad' WHERE id = ?", (bad.id,))
    alike = store.claim_alike("default", first)
    assert alike is not None
    assert alike.id == other.id


def test_a_running_row_that_was_changed_by_hand_fails_at_the_start(store: JobStore) -> None:
    bad = store.add(NewJob({"prompt": "x"}))
    good = store.add(NewJob({"prompt": "x"}))
    assert store.claim("default") is not None
    assert store.claim("default") is not None
    with store._database.write() as writing:
        writing.execute("UPDATE videos SET resolved = '?' WHERE id = ?", (bad.id,))
        writing.execute("UPDATE events SET data = '?' WHERE video = ?", (bad.id,))
    assert [job.id for job in store.recover()] == [good.id]
    assert store.count()["failed"] == 1
    first, *_ = store.events(video=bad.id)
    assert first.type == "note"
    assert "changed by hand" in first.data["text"]


def test_json_of_other_values_is_shown_as_a_failed_job(store: JobStore) -> None:
    job = store.add(NewJob({"prompt": "x"}))
    with store._database.write() as writing:
        writing.execute("UPDATE videos SET request = '{}', resolved = '{\"seconds\": \"x\"}'")
    found = store.get(job.id)
    assert found is not None
    shown = video_resource(found)
    assert shown["status"] == "failed"
    assert "can't be read (ValueError" in shown["error"]["message"]
