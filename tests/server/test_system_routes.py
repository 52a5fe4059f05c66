"""What the server says of itself: why it is not ready, and the doctor's findings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.server.data_folder import DataFolder
from everyframe.server.errors import ApiError
from everyframe.server.machine import CachedResult
from everyframe.server.queue.jobs import NewJob
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp


@pytest.fixture
def app(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server") as app:
        yield app


def reasons(app: ServedApp) -> dict[str, str]:
    """Message by code."""
    answer = app.client.get("/ready")
    data = answer.json()
    is_ready = not data["reasons"]
    assert (answer.status_code, data["status"]) == (
        (200, "ready") if is_ready else (503, "not_ready")
    )
    return {each["code"]: each["message"] for each in data["reasons"]}


def test_a_server_that_could_begin_a_job_is_ready(app: ServedApp) -> None:
    assert reasons(app) == {}


def test_a_disk_without_room_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher waits for room too, and says how much it needs."""
    with ServedApp(tmp_path / "server", FakeExecutor(), runs=True) as app:
        monkeypatch.setattr(DataFolder, "free_bytes", lambda self: -1)
        until = time.monotonic() + 10
        while app.dispatcher.problem is None and time.monotonic() < until:
            time.sleep(0.01)
        found = reasons(app)
        assert [*found] == ["jobs_wait", "disk_full"]
        assert found["jobs_wait"] == (
            "no job begins: the disk of the data folder has -0 MiB left; jobs wait until there "
            "are 0 MiB"
        )
        assert "1.1 GB are needed" in found["disk_full"]
        monkeypatch.undo()
        while app.dispatcher.problem is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert reasons(app) == {}, "it is ready by itself once there is room"


def test_a_queue_that_cannot_be_written_is_a_reason_without_a_path(app: ServedApp) -> None:
    """Anybody may ask, also where the other routes need a key."""
    app.store._database._writer.execute("PRAGMA query_only=ON")
    found = reasons(app)
    assert [*found] == ["storage_unavailable"]
    assert "make the folder writable" in found["storage_unavailable"]
    assert str(app.folder.path) not in found["storage_unavailable"]
    app.store._database._writer.execute("PRAGMA query_only=OFF")
    assert reasons(app) == {}


def test_a_data_folder_that_was_moved_is_a_reason(app: ServedApp) -> None:
    moved = app.folder.path.rename(app.folder.path.with_name("moved"))
    found = reasons(app)
    assert [*found] == ["storage_unavailable"]
    assert "was removed or replaced" in found["storage_unavailable"]
    for path in ("/v1/videos", "/v1/system"):
        answer = app.client.get(path)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True), path
    moved.rename(app.folder.path)
    assert reasons(app) == {}, "it is ready by itself once the folder is back"


def test_a_server_that_shuts_down_is_not_ready(app: ServedApp) -> None:
    app.context.begin_drain()
    assert reasons(app) == {"draining": "the server shuts down"}


def test_a_long_queue_begins_with_what_runs_and_what_is_next(app: ServedApp) -> None:
    """However many older jobs wait behind them."""
    jobs = app.store.add_all([NewJob({"prompt": "a"}) for _ in range(120)])
    (second,) = app.store.add_all([NewJob({"prompt": "a"}, priority=1)])
    (first,) = app.store.add_all([NewJob({"prompt": "a"}, priority=2)])
    assert app.store.claim("default").id == first.id
    queue = app.client.get("/v1/queue").json()
    assert queue["counts"]["queued"] == 121
    shown = [row["id"] for row in queue["data"]]
    assert shown == [first.id, second.id, *(job.id for job in jobs[:98])]


class Patient:
    """A doctor that answers when the test lets it; `num_calls` are those that came."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_calls, self.error = 0, error
        self.began, self.may_answer = threading.Event(), threading.Event()

    def __call__(self) -> dict[str, Any]:
        self.num_calls += 1
        self.began.set()
        assert self.may_answer.wait(20)
        if self.error is not None:
            raise self.error
        return {"findings": self.num_calls}


class Counted(CachedResult):
    """Knows how many have asked it."""

    num_asked = 0

    async def get(self) -> Any:
        self.num_asked += 1
        return await super().get()


def ask_at_once(app: ServedApp, patient: Patient) -> list[Any]:
    """Answers of five who ask the doctor; meanwhile everybody else is answered."""
    app.context.doctor = doctor = Counted(patient, 600)
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(app.client.get, "/v1/doctor") for _ in range(5)]
        assert patient.began.wait(20)
        for path in ("/health", "/ready", "/v1/videos", "/v1/queue", "/v1/models"):
            assert app.client.get(path).status_code == 200, path
        made = app.client.post("/v1/videos", json={"prompt": "a red circle"})
        assert made.status_code == 200
        until = time.monotonic() + 20
        while doctor.num_asked < 5 and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(each.done() for each in asked)
        patient.may_answer.set()
        return [each.result(20) for each in asked]


def test_the_doctor_is_asked_once_and_holds_up_nobody(app: ServedApp) -> None:
    patient = Patient()
    answers = [answer.json() for answer in ask_at_once(app, patient)]
    assert answers == [{"findings": 1}] * 5
    assert app.client.get("/v1/doctor").json() == {"findings": 1}
    assert patient.num_calls == 1


def test_a_doctor_who_fails_is_asked_again(app: ServedApp) -> None:
    """By the next who comes, not by each of those who wait."""
    patient = Patient(ApiError("server_error", "the doctor could not be asked: killed"))
    for answer in ask_at_once(app, patient):
        assert answer.status_code == 500
        assert "the doctor could not be asked" in answer.json()["error"]["message"]
    assert patient.num_calls == 1
    patient.error = None
    assert app.client.get("/v1/doctor").json() == {"findings": 2}


def test_an_old_answer_is_asked_for_again(app: ServedApp) -> None:
    patient = Patient()
    patient.may_answer.set()
    app.context.doctor = CachedResult(patient, 0)
    assert [app.client.get("/v1/doctor").json()["findings"] for _ in range(2)] == [1, 2]
