"""The queue: claims, order, idempotency, events and recovery, in a file that outlives a process."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import Any

import pytest

from everyframe.core.errors import InputError, QueueFullError, StoreError
from everyframe.server.data_folder import DataFolder
from everyframe.server.queue import row_insertion
from everyframe.server.queue import store as stores
from everyframe.server.queue.jobs import Job, NewJob
from everyframe.server.queue.store import JobStore
from helpers.server_jobs import synchronous_levels


def new(prompt: str = "a red circle", **values: Any) -> NewJob:
    return NewJob({"prompt": prompt}, **values)


def test_a_job_keeps_what_was_asked(store: JobStore) -> None:
    job = store.add(NewJob({"prompt": "ein Kreis ●", "seed": 3}, owner="ann", model="shapes",
                           report={"warnings": ["quality is ignored"]}))  # fmt: skip
    assert job.status == "queued"
    assert job.request == {"prompt": "ein Kreis ●", "seed": 3}
    assert job.report == {"warnings": ["quality is ignored"]}
    assert store.get(job.id) == job == store.get(job.id, owner="ann")
    assert store.get(job.id, owner="bob") is None
    assert store.get("video_" + "0" * 32) is None


def test_a_seed_is_drawn_once(store: JobStore) -> None:
    first, second = (store.add(new()) for _ in range(2))
    assert first.request["seed"] != second.request["seed"]
    found = store.get(first.id)
    assert found is not None
    assert found.request["seed"] == first.request["seed"]


def test_the_file_is_safe_against_a_power_cut(store: JobStore, folder: DataFolder) -> None:
    with store._database.write() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 1


def test_only_what_can_be_lost_does_not_wait_for_the_disk(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a wait, the loss of a claim or of progress is that of a server that died.
    levels = synchronous_levels(store, monkeypatch)
    job, other = store.add(new()), store.add(new())
    assert store.claim("default") is not None
    store.update(job.id, progress=7)
    store.requeue(job.id, counts_attempt=False)
    store.finish(job.id, "completed", file="v.mp4")
    store.request_cancel(other.id)
    store.delete(other.id)
    assert levels == [2, 2, 1, 1, 2, 2, 2, 2]


def test_another_schema_is_refused(folder: DataFolder) -> None:
    JobStore(folder).close()
    with sqlite3.connect(folder.database) as connection:
        connection.execute("PRAGMA user_version=7")
    connection.close()
    with pytest.raises(StoreError, match="schema 7, this one has 1"):
        JobStore(folder)


def test_a_damaged_file_is_an_error_for_people(folder: DataFolder) -> None:
    folder.database.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="can't be read or written"):
        JobStore(folder)


def test_claims_go_by_priority_then_age(store: JobStore) -> None:
    low, high, late = (store.add(new(priority=number)) for number in (0, 1, 0))
    assert [store.queue_position(job) for job in (high, low, late)] == [0, 1, 2]
    claimed = [store.claim("cpu") for _ in range(4)]
    assert [job and job.id for job in claimed] == [high.id, low.id, late.id, None]
    first = claimed[0]
    assert first is not None
    assert (first.status, first.group, first.attempts) == ("in_progress", "cpu", 1)
    assert store.queue_position(first) is None


def test_a_preferred_model_goes_first_among_equals(store: JobStore) -> None:
    other, same, high = (
        store.add(new(model=model, priority=priority))
        for model, priority in (("svd", 0), ("shapes", 0), ("svd", 1))
    )
    order = [store.claim("cpu", prefers="shapes") for _ in range(3)]
    assert [job and job.id for job in order] == [high.id, same.id, other.id]


def test_no_job_is_claimed_twice(store: JobStore) -> None:
    added = {store.add(new()).id for _ in range(40)}
    claimed: list[str] = []

    def claim_all() -> None:
        while (job := store.claim(threading.current_thread().name)) is not None:
            claimed.append(job.id)

    threads = [threading.Thread(target=claim_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(added)


def test_an_idempotency_key_is_one_job(store: JobStore) -> None:
    first = store.add(new(idempotency="k", body_hash="1", owner="ann"))
    assert store.add(new(idempotency="k", body_hash="1", owner="ann")).id == first.id
    assert store.add(new(idempotency="k", body_hash="1", owner="bob")).id != first.id
    with pytest.raises(InputError, match="'k' was used for another request"):
        store.add(new(idempotency="k", body_hash="2", owner="ann"))


def test_a_repeated_request_is_one_job(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.add(new(body_hash="1"))
    assert store.add(new(body_hash="1", retry_count=1)).id == first.id
    assert store.add(new(body_hash="2", retry_count=1)).id != first.id
    assert store.add(new(body_hash="1")).id != first.id, "asked for twice on purpose"
    monkeypatch.setattr(row_insertion, "REPEAT_SECONDS", -1.0)
    assert store.add(new(body_hash="1", retry_count=1)).id != first.id


def test_a_full_queue_refuses(store: JobStore) -> None:
    store.add(new(owner="ann", max_queued=2, max_queued_of_owner=1))
    with pytest.raises(QueueFullError, match="1 jobs of this key wait, at most 1"):
        store.add(new(owner="ann", max_queued=2, max_queued_of_owner=1))
    store.add(new(owner="bob", max_queued=2, max_queued_of_owner=1))
    with pytest.raises(QueueFullError, match="2 jobs wait, at most 2"):
        store.add(new(owner="eve", max_queued=2, max_queued_of_owner=1))
    assert store.claim("cpu") is not None
    store.add(new(owner="eve", max_queued=2, max_queued_of_owner=1))


def test_lists_are_paged(store: JobStore) -> None:
    ids = [store.add(new(owner="ann")).id for _ in range(5)]
    store.add(new(owner="bob"))
    assert [job.id for job in store.list(owner="ann")] == ids[::-1]
    page = store.list(owner="ann", limit=2, order="asc")
    assert [job.id for job in page] == ids[:2]
    page = store.list(owner="ann", limit=2, order="asc", after=page[-1].id)
    assert [job.id for job in page] == ids[2:4]
    store.request_cancel(ids[0])
    assert [job.id for job in store.list(statuses=["cancelled"])] == ids[:1]
    assert store.count(owner="ann") == {
        "queued": 4, "in_progress": 0, "completed": 0, "failed": 0, "cancelled": 1,
    }  # fmt: skip
    with pytest.raises(InputError, match="after must be the id of a video"):
        store.list(owner="bob", after=ids[0])
    with pytest.raises(InputError, match="order must be asc or desc"):
        store.list(order="up")
    with pytest.raises(InputError, match="status must be one of"):
        store.list(statuses=["done"])


def test_a_whole_life_in_events(store: JobStore) -> None:
    seen: list[str] = []
    stop = store.listen(lambda event: seen.append(event.type))
    job = store.add(new())
    store.claim("cpu")
    store.update(job.id, progress=30, phase="denoise", event=("progress", {"progress": 30}))
    store.update(job.id, progress=31)
    done = store.finish(job.id, "completed", file="videos/x/video.mp4", report={"checks": {}})
    assert (done.status, done.progress, done.file) == ("completed", 100, "videos/x/video.mp4")
    assert done.completed_at is not None
    stop()
    store.add(new())
    events = store.events(video=job.id)
    assert [(each.type, each.data) for each in events] == [
        ("status", {"status": "queued"}),
        ("status", {"status": "in_progress"}),
        ("progress", {"progress": 30}),
        ("done", {"status": "completed"}),
    ]
    assert seen == [each.type for each in events]
    assert [each.number for each in events] == sorted({each.number for each in events})
    assert store.events(video=job.id, after=events[1].number) == events[2:]
    assert store.events(owner="nobody") == []


def test_event_numbers_go_on_after_a_restart(store: JobStore, folder: DataFolder) -> None:
    job = store.add(new())
    store.close()
    again = JobStore(folder)
    assert again.last_event == 1
    again.update(job.id, event=("note", {"text": "hello"}))
    assert again.last_event == 2
    again.close()


def test_waiting_ends_with_an_event(store: JobStore) -> None:
    job = store.add(new())
    note = {"event": ("note", {})}
    timer = threading.Timer(0.05, store.update, (job.id,), note)
    timer.start()
    began = time.monotonic()
    store.wait(store.last_event, 10)
    assert time.monotonic() - began < 5
    timer.join()
    began = time.monotonic()
    store.wait(store.last_event, 0.05)
    assert time.monotonic() - began >= 0.05


def test_waiting_ends_where_it_is_over(store: JobStore) -> None:
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        store.wake()

    timer = threading.Timer(0.05, end)
    timer.start()
    began = time.monotonic()
    store.wait(store.last_event, 10, is_over.is_set)
    store.wait(store.last_event, 10, is_over.is_set)
    assert time.monotonic() - began < 5
    timer.join()


def test_old_events_go(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from everyframe.server.queue import transaction

    monkeypatch.setattr(transaction, "MAX_EVENTS", 10)
    monkeypatch.setattr(transaction, "_PRUNE_EVERY", 5)
    job = store.add(new())
    for number in range(29):
        store.update(job.id, event=("note", {"number": number}))
    assert len(store.events()) == 10
    store.finish(job.id, "completed")
    monkeypatch.setattr(transaction, "EVENT_SECONDS", -1.0)
    other = store.add(new())
    for _ in range(5):
        store.update(other.id, event=("note", {}))
    assert store.events(video=job.id) == []


def test_cancelling(store: JobStore) -> None:
    queued, running = store.add(new(priority=0)), store.add(new(priority=1))
    store.claim("cpu")
    assert store.request_cancel(queued.id).status == "cancelled"
    marked = store.request_cancel(running.id)
    assert (marked.status, marked.is_cancel_requested) == ("in_progress", True)
    done = store.finish(running.id, "completed")
    assert store.request_cancel(running.id) == done, "too late"
    with pytest.raises(LookupError):
        store.request_cancel("video_" + "0" * 32)


def test_attempts_count_what_they_should(store: JobStore) -> None:
    job = store.add(new())
    store.claim("cpu")
    assert store.requeue(job.id, counts_attempt=False).attempts == 0
    store.claim("cpu")
    assert store.requeue(job.id, counts_attempt=True).attempts == 1
    claimed = store.claim("cpu")
    assert claimed is not None
    assert claimed.attempts == 2
    store.finish(job.id, "failed", error={"code": "worker_died", "message": "it died"})
    again = store.retry(job.id)
    assert (again.attempts, again.error, again.completed_at) == (0, None, None)


def test_deleting_takes_all_files_and_leaves_an_event(store: JobStore, folder: DataFolder) -> None:
    job = store.add(new(owner="ann"))
    store.claim("cpu")
    assert not store.delete(job.id), "it runs"
    folder.new_video(job.id)
    folder.publish(job.id, {})
    (folder.runs_of(job.id) / "run").mkdir(parents=True)
    store.finish(job.id, "completed")
    assert store.delete(job.id)
    assert store.get(job.id) is None
    assert not folder.video(job.id).exists()
    assert not folder.runs_of(job.id).exists()
    assert [event.type for event in store.events(video=job.id, owner="ann")] == ["deleted"]
    assert not store.delete(job.id)


def test_recovery_gives_every_job_one_place(store: JobStore, folder: DataFolder) -> None:
    jobs = [store.add(new()) for _ in range(5)]
    for _ in jobs[:4]:
        store.claim("cpu")
    finished, cancelled, poison, interrupted = jobs[:4]
    folder.new_video(finished.id)
    folder.publish(finished.id, {"file": "videos/x/video.mp4", "report": {"checks": {"a": 1}}})
    folder.new_video(interrupted.id)  # killed before it was whole
    store.request_cancel(cancelled.id)
    store.update(poison.id, interruptions=stores.MAX_INTERRUPTIONS - 1)
    (folder.new_video(poison.id) / "half.mp4").write_bytes(b"frames")
    store.update(interrupted.id, interruptions=stores.MAX_INTERRUPTIONS - 1)
    (folder.runs_of(interrupted.id) / "run").mkdir(parents=True)
    (folder.runs_of(finished.id) / "run").mkdir(parents=True)
    (folder.runs / ("video_" + "0" * 32)).mkdir()
    store.close()

    again = JobStore(folder)
    back = again.recover()
    assert [(job.id, job.status, job.attempts) for job in back] == [(interrupted.id, "queued", 0)]
    found = {job.id: job for job in again.list()}
    assert [found[job.id].status for job in jobs] == [
        "completed", "cancelled", "failed", "queued", "queued",
    ]  # fmt: skip
    done: Job = found[finished.id]
    assert (done.file, done.report, done.progress) == (
        "videos/x/video.mp4", {"checks": {"a": 1}}, 100,
    )  # fmt: skip
    assert found[poison.id].error == {
        "code": "server_died",
        "message": "the server died 10 times while it made this video",
    }
    assert [path.name for path in folder.runs.iterdir()] == [interrupted.id]
    assert [path.name for path in folder.videos.iterdir()] == [finished.id]
    claimed = [again.claim("cpu"), again.claim("cpu")]
    assert [job and job.id for job in claimed] == [interrupted.id, jobs[4].id]
    assert len(again.recover()) == 2
    assert again.recover() == [], "only once a death"
    again.close()


def test_expired_jobs_are_named(store: JobStore) -> None:
    old, fresh, retried, kept = (store.add(new()) for _ in range(4))
    for job, seconds in ((old, 10.0), (fresh, 30.0), (retried, 10.0), (kept, None)):
        store.retention_seconds = seconds
        store.claim("cpu")
        store.finish(job.id, "failed", error={"code": "internal", "message": "no"})
    store.retry(retried.id)
    now = time.time()
    assert [job.id for job in store.expired(now + 20.0)] == [old.id]
    assert [job.id for job in store.expired(now + 40.0)] == [old.id, fresh.id]


def test_a_disk_that_became_read_only_is_an_error_for_people(store: JobStore) -> None:
    job = store.add(new())
    store._database._writer.execute("PRAGMA query_only=ON")
    with pytest.raises(StoreError, match=r"readonly database.*make the folder writable"):
        store.add(new())
    with pytest.raises(StoreError):
        store.is_writable()
    assert store.get(job.id) == job
    store._database._writer.execute("PRAGMA query_only=OFF")
    assert store.is_writable()


def test_a_full_disk_loses_nothing(store: JobStore) -> None:
    job = store.add(new())
    with store._database.write() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    store._database._writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match=r"full.*free some space"):
        store.add(new("x" * 1_000_000))
    store._database._writer.execute("PRAGMA max_page_count=1000000")
    assert store.get(job.id) == job
    before = len(store.list(limit=1000))
    store.add(new("after"))
    assert len(store.list(limit=1000)) == before + 1
