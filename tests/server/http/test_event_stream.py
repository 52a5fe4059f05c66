"""Event streams: what a client sees while a job runs, after a break, and as the server drains."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.events import Preview
from everyframe.server.http import event_stream
from everyframe.server.http.access import Principal
from everyframe.server.settings import Limits
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp, key, listening

PROMPT = {"prompt": "a red circle"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server", FakeExecutor(pause=0.05), runs=True) as app:
        yield app


def events_of(text: str) -> list[tuple[int | None, str, Any]]:
    """(number, type, data) of a stream's text."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:
            number = int(lines["id"]) if "id" in lines else None
            found.append((number, lines["event"], json.loads(lines["data"])))
    return found


def create(app: ServedApp) -> str:
    answer = app.client.post("/v1/videos", json=PROMPT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def read(app: ServedApp, path: str, **headers: str) -> list[tuple[int | None, str, Any]]:
    answer = app.client.get(path, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    return events_of(answer.text)


def test_a_stream_follows_its_job_to_the_end(running: ServedApp) -> None:
    video = create(running)
    seen = read(running, f"/v1/videos/{video}/events")
    kinds = [kind for _, kind, _ in seen]
    assert kinds[:2] == ["status", "progress"]
    assert kinds[-1] == "done"
    assert "stage" in kinds
    done = seen[-1][2]
    assert (done["object"], done["id"], done["status"]) == ("video", video, "completed")
    assert done["progress"] == 100
    progress = [data["progress"] for _, kind, data in seen if kind == "progress"]
    assert progress == sorted(progress)
    assert all(each < 100 for each in progress)
    assert all(data["video"] == video for _, _, data in seen)
    numbers = [number for number, _, _ in seen if number is not None]
    assert numbers == sorted(numbers)


def test_a_stream_goes_on_after_a_break(running: ServedApp) -> None:
    video = create(running)
    whole = read(running, f"/v1/videos/{video}/events?after=0")
    numbers = [number for number, _, _ in whole]
    assert numbers == sorted(set(numbers)), "each event once"
    for last in (numbers[0], numbers[3], numbers[-2]):
        rest = read(running, f"/v1/videos/{video}/events", **{"last-event-id": str(last)})
        assert rest[-1][1] == "done"
        assert all(number is None or number >= last for number, _, _ in rest)
    strange = read(running, f"/v1/videos/{video}/events", **{"last-event-id": "x"})
    assert [kind for _, kind, _ in strange] == ["done"]


def test_a_number_that_no_event_has_yet_counts_as_none(running: ServedApp) -> None:
    # The client has it from another data folder, or from before a power cut.
    video = create(running)
    seen = read(running, f"/v1/videos/{video}/events", **{"last-event-id": "1000000"})
    assert (seen[0][1], seen[-1][1]) == ("status", "done")
    assert all(number is not None and number < 1000 for number, _, _ in seen)


def test_all_jobs_are_in_one_stream_and_draining_ends_it(running: ServedApp) -> None:
    first = create(running)
    threading.Timer(1.0, running.context.begin_drain).start()
    second = create(running)
    began = time.monotonic()
    seen = read(running, "/v1/events")
    assert time.monotonic() - began < 5
    assert seen[-1][1] == "draining"
    assert {data["video"] for _, _, data in seen[:-1]} == {first, second}
    answer = running.client.post("/v1/videos", json=PROMPT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert answer.headers["retry-after"]
    assert running.client.get("/ready").status_code == 503
    assert running.client.get(f"/v1/videos/{first}").status_code == 200


def test_previews_come_where_they_are_asked_for(running: ServedApp) -> None:
    video = create(running)
    preview = Preview(5, 2, 5, 8, 8, b"a picture")
    running.dispatcher._take_preview(video, preview)
    seen = [data for _, kind, data in read(running, f"/v1/videos/{video}/events?preview=1")
            if kind == "preview"]  # fmt: skip
    assert seen[0]["image"].startswith("data:image/jpeg;base64,")
    assert (seen[0]["step"], seen[0]["total_steps"], seen[0]["video"]) == (2, 5, video)
    other = create(running)
    running.dispatcher._take_preview(other, preview)
    kinds = {kind for _, kind, _ in read(running, f"/v1/videos/{other}/events")}
    assert "preview" not in kinds


def test_idle_streams_are_kept_open(running: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.05)
    threading.Timer(0.5, running.context.begin_drain).start()
    assert running.client.get("/v1/events").text.count(": ping\n\n") > 2


def test_sync_waits_for_the_file(running: ServedApp) -> None:
    answer = running.client.post("/v1/videos/sync", json={**PROMPT, "seed": 3})
    assert (answer.status_code, answer.content[4:8]) == (200, b"ftyp")
    assert (answer.headers["x-seed"], answer.headers["x-model"]) == ("3", "shapes")
    assert json.loads(answer.headers["x-stage-durations"])["denoise"] > 0


def test_sync_says_why_there_is_no_file(tmp_path: Path) -> None:
    from everyframe.core.errors import InputError, NumericsError

    failures = [(1, NumericsError("not finite")), (1, InputError("too long"))]
    executor = FakeExecutor(failures=failures)
    with ServedApp(tmp_path / "server", executor, runs=True) as app:
        for status, code, inner in (
            (500, "job_failed", "numerics"),
            (400, "invalid_value", "input"),
        ):
            answer = app.client.post("/v1/videos/sync", json=PROMPT)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["details"]["code"]) == (
                status, code, inner,
            )  # fmt: skip
    with ServedApp(tmp_path / "other", has_sync=False) as app:
        assert app.client.post("/v1/videos/sync", json=PROMPT).status_code in (404, 405)


def test_a_client_that_leaves_cancels_what_it_waits_for(tmp_path: Path) -> None:
    served = ServedApp(tmp_path / "server", FakeExecutor(pause=0.3), runs=True)
    with served as app, listening(app) as address:
        place = address.removeprefix("http://")
        host, _, port = place.partition(":")
        body = json.dumps(PROMPT)
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                f"POST /v1/videos/sync HTTP/1.1\r\nhost: {place}\r\ncontent-type: "
                f"application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            while app.store.count()["in_progress"] == 0:
                time.sleep(0.01)
        ends = time.monotonic() + 10
        while app.store.count()["cancelled"] == 0:
            assert time.monotonic() < ends, app.store.count()
            time.sleep(0.02)


def test_open_streams_have_a_limit(running: ServedApp) -> None:
    hub = running.context.hub
    assert hub is not None
    limit = running.settings.limits.event_streams
    hub._streams |= {asyncio.Event(): Principal() for _ in range(limit)}
    try:
        answer = running.client.get("/v1/events")
    finally:
        hub._streams.clear()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limited")


def test_a_keys_streams_leave_room_for_those_of_others(tmp_path: Path) -> None:
    keys = (key("ann", "a"), key("bob", "b"))
    limits = Limits(event_streams_of_key=2)
    ann, bob = ({"authorization": f"Bearer {each}"} for each in "ab")
    with ServedApp(tmp_path / "server", FakeExecutor(), runs=True, keys=keys, limits=limits) as app:
        hub = app.context.hub
        assert hub is not None
        hub._streams |= {asyncio.Event(): Principal("ann", "user") for _ in range(2)}
        refused = app.client.post("/v1/videos/sync", json=PROMPT, headers=ann)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert app.store.list() == [], "what is refused leaves no job"
        answer = app.client.post("/v1/videos/sync", json=PROMPT, headers=bob)
        assert answer.status_code == 200
