"""Creates that come at once: one wait for the disk, and each is answered as if it came alone."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.errors import InputError, QueueFullError, StoreError
from everyframe.server.queue.job_adder import JobAdder
from everyframe.server.queue.jobs import Job, NewJob
from everyframe.server.queue.store import JobStore
from everyframe.server.queue.transaction import Transaction
from everyframe.server.settings import Limits
from helpers.server_app import ServedApp, key
from helpers.server_jobs import synchronous_levels

PROMPT = {"prompt": "a red circle"}


def new(prompt: str = "a red circle", **values: Any) -> NewJob:
    return NewJob({"prompt": prompt}, **values)


def numbered(number: int, **values: Any) -> list[NewJob]:
    return [new(str(place), body_hash=str(place), **values) for place in range(number)]


def prompts(store: JobStore) -> list[str]:
    return [job.request["prompt"] for job in store.list(limit=1000, order="asc")]


async def add_at_once(adder: JobAdder, jobs: Sequence[NewJob]) -> list[Any]:
    return await asyncio.gather(*(adder.add(job) for job in jobs), return_exceptions=True)


@contextmanager
def counted_writes(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The level of `synchronous` of each transaction within."""
    with monkeypatch.context() as patched:
        yield synchronous_levels(store, patched)


def test_many_at_once_share_a_commit_and_keep_their_order(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_writes(store, monkeypatch) as levels:
        placed = asyncio.run(add_at_once(JobAdder(store), numbered(50)))
    assert levels == [2], "all of them in one transaction that waits for the disk"
    assert [position for _, position in placed] == [*range(50)]
    assert prompts(store) == [str(place) for place in range(50)]
    assert len({job.id for job, _ in placed}) == 50
    events = [event.video for event in store.events()]
    assert events == [job.id for job, _ in placed]


def test_nobody_is_answered_before_the_commit(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes its time no create is answered, and those that come meanwhile wait."""
    at_commit, go_on = threading.Event(), threading.Event()
    write = store._database.write

    @contextmanager
    def held(**values: Any) -> Iterator[sqlite3.Connection]:
        with write(**values) as connection:
            yield connection
            at_commit.set()
            assert go_on.wait(10)

    async def race() -> None:
        adder = JobAdder(store)
        first = [asyncio.create_task(adder.add(job)) for job in numbered(3)]
        assert await asyncio.to_thread(at_commit.wait, 10)
        second = [asyncio.create_task(adder.add(new("later"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (*first, *second))
        assert prompts(store) == [], "another connection sees no row before it is written"
        go_on.set()
        await asyncio.gather(*first, *second)

    monkeypatch.setattr(store._database, "write", held)
    asyncio.run(race())
    assert prompts(store) == ["0", "1", "2", "later", "later", "later"]


def test_one_that_breaks_a_rule_hurts_no_other(store: JobStore) -> None:
    taken = store.add(new("taken", idempotency="key", body_hash="a"))
    jobs = numbered(50)
    jobs[10] = new("same", idempotency="key", body_hash="a")
    jobs[20] = new("other", idempotency="key", body_hash="b")
    jobs[30] = new("no room", max_queued=5)
    jobs[40] = NewJob({"prompt": "no number", "guidance_scale": float("nan")})
    placed = asyncio.run(add_at_once(JobAdder(store), jobs))
    assert placed[10] == (taken, 0)
    assert isinstance(placed[20], InputError)
    assert isinstance(placed[30], QueueFullError)
    assert isinstance(placed[40], ValueError)
    good = [place for place in range(50) if place not in (10, 20, 30, 40)]
    assert prompts(store) == ["taken", *map(str, good)]
    assert [placed[place][0].request["prompt"] for place in good] == [*map(str, good)]
    # A job that was not added leaves no event either.
    assert [e.video for e in store.events()] == [taken.id, *(placed[place][0].id for place in good)]


def test_an_error_between_row_and_event_leaves_no_row(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Transaction.event

    def broken(self: Transaction, id: str, owner: str, type: str, data: Any) -> int:  # noqa: A002
        number = event(self, id, owner, type, data)
        if owner == "bad":
            raise ValueError("a defect")
        return number

    jobs = numbered(3)
    jobs[1] = new("bad", owner="bad")
    heard: list[str] = []
    store.listen(lambda event: heard.append(event.video))
    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "event", broken)
        placed = asyncio.run(add_at_once(JobAdder(store), jobs))
    assert isinstance(placed[1], ValueError)
    assert prompts(store) == ["0", "2"]
    added = [placed[0][0].id, placed[2][0].id]
    assert [event.video for event in store.events()] == added == heard


def test_a_key_makes_one_job_of_many_requests_at_once(store: JobStore) -> None:
    job = new(idempotency="key", body_hash="a")
    placed = asyncio.run(add_at_once(JobAdder(store), [job] * 50))
    assert len({made.id for made, _ in placed}) == 1
    assert len(prompts(store)) == len(store.events()) == 1


def test_a_full_queue_takes_exactly_what_it_has_room_for(store: JobStore) -> None:
    placed = asyncio.run(add_at_once(JobAdder(store), numbered(50, max_queued=7)))
    assert [isinstance(each, QueueFullError) for each in placed] == [False] * 7 + [True] * 43
    assert prompts(store) == [str(place) for place in range(7)]


def fill_disk(store: JobStore) -> None:
    with store._database.write() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    store._database._writer.execute(f"PRAGMA max_page_count={pages}")


def test_a_disk_that_fills_up_takes_whole_jobs_or_nothing(store: JobStore) -> None:
    """The one that is too large is refused, although all of them came as one group."""
    fill_disk(store)
    jobs = [new("0"), new("1"), new("x" * 1_000_000), new("3")]
    placed = asyncio.run(add_at_once(JobAdder(store), jobs))
    assert [isinstance(each, StoreError) for each in placed] == [False, False, True, False]
    assert "free some space" in str(placed[2])
    assert prompts(store) == ["0", "1", "3"]
    assert len(store.events()) == 3


def test_a_disk_that_is_full_answers_everyone_and_goes_on(store: JobStore) -> None:
    kept = store.add(new("kept"))
    fill_disk(store)
    huge = [new("x" * 1_000_000)] * 5
    placed = asyncio.run(add_at_once(JobAdder(store), huge))
    assert [type(each) for each in placed] == [StoreError] * 5
    store._database._writer.execute("PRAGMA max_page_count=1000000")
    assert store.list() == [kept]
    assert len(asyncio.run(add_at_once(JobAdder(store), huge))) == len(store.list()) - 1 == 5


def test_a_group_that_a_crash_cuts_off_is_not_there(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes after each row was written, before the commit."""
    write = store._database.write
    deaths = iter([True])

    @contextmanager
    def broken(**values: Any) -> Iterator[sqlite3.Connection]:
        with write(**values) as connection:
            yield connection
            if next(deaths, False):
                raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._database, "write", broken)
    placed = asyncio.run(add_at_once(JobAdder(store), numbered(10)))
    assert [job.request["prompt"] for job, _ in placed] == [str(place) for place in range(10)]
    assert prompts(store) == [str(place) for place in range(10)], "once each, by itself"


def test_a_caller_that_leaves_takes_nobody_with_it(store: JobStore) -> None:
    async def leave() -> list[Any]:
        adder = JobAdder(store)
        tasks = [asyncio.create_task(adder.add(job)) for job in numbered(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    gone, *others = asyncio.run(leave())
    assert isinstance(gone, asyncio.CancelledError)
    assert [job.request["prompt"] for job, _ in others] == ["1", "2"]
    assert prompts(store) == ["0", "1", "2"]


def test_an_error_of_ours_reaches_every_caller(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(jobs: Sequence[NewJob]) -> list[Job]:
        raise AssertionError("a defect")

    adder = JobAdder(store)
    with monkeypatch.context() as patched:
        patched.setattr(store, "add_all", fail)
        placed = asyncio.run(add_at_once(adder, numbered(3)))
    assert [type(each) for each in placed] == [AssertionError] * 3
    assert len(asyncio.run(add_at_once(adder, numbered(3)))) == len(store.list()) == 3


def test_fifty_clients_at_once_are_each_answered_rightly(tmp_path: Path) -> None:
    keys = (key("ann", "a"), key("bob", "b"))
    limits = Limits(queued=40, queued_of_key=25, creations_a_minute=None)
    with ServedApp(tmp_path / "server", keys=keys, limits=limits) as app:

        def create(number: int) -> tuple[int, str, Any]:
            who = "ab"[number % 2]
            headers = {"authorization": f"Bearer {who}"}
            if number < 8:
                headers["idempotency-key"] = f"key {number // 4}"
            body = {**PROMPT, "seed": 7 if number < 6 else number}
            answer = app.client.post("/v1/videos", json=body, headers=headers)
            return answer.status_code, who, answer.json()

        with ThreadPoolExecutor(50) as pool:
            answers = [*pool.map(create, range(50))]
        made = {(who, data["id"]) for status, who, data in answers if status == 200}
        rows = app.store.list(limit=100)
        owners = {"ann": "a", "bob": "b"}
        assert {(owners[row.owner], row.id) for row in rows} == made, (
            "all that was answered is there"
        )
        refusals = [data["error"] for status, _, data in answers if status != 200]
        assert {error["code"] for error in refusals} <= {"queue_full", "invalid_value"}
        assert len(rows) == 40
        for owner in owners:
            assert sum(row.owner == owner for row in rows) <= 25
        # Key 0 has one body of each owner, key 1 two, of which one wins.
        for error in refusals:
            if error["code"] == "invalid_value":
                assert "'key 1' was used for another request" in error["message"]
        taken = [(row.owner, row.idempotency) for row in rows if row.idempotency]
        assert 0 < len(taken) == len({*taken}) <= 4
