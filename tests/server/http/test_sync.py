"""Repeated requests that wait for their video: each gets the file of the same job."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.errors import NumericsError
from everyframe.server.http import event_stream
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp, listening

PROMPT = {"prompt": "a red circle"}
KEY = {"idempotency-key": "one"}


@pytest.fixture(autouse=True)
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's end is noticed at the next line of its stream."""
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server", FakeExecutor(), runs=True) as app:
        yield app


def sync(app: ServedApp) -> Any:
    return app.client.post("/v1/videos/sync", json=PROMPT, headers=KEY)


def wait_for(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_repetition_long_after_the_end_gets_the_file(running: ServedApp) -> None:
    """The events of a finished job are deleted after a day."""
    first = sync(running)
    with running.store._database.write() as writing:
        writing.execute("DELETE FROM events")
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(sync(running)), daemon=True)
    asking.start()
    asking.join(5)
    running.context.begin_drain()  # else one that hangs would keep the test
    asking.join(5)
    (again,) = answers
    assert (again.status_code, again.content) == (200, first.content)
    assert running.context.num_waiting == {}


def test_a_retried_job_is_waited_for(tmp_path: Path) -> None:
    """Its first end is among its events."""
    executor = FakeExecutor(failures=[(1, NumericsError("not finite"))])
    with ServedApp(tmp_path / "server", executor, runs=True) as app:
        assert sync(app).json()["error"]["code"] == "job_failed"
        (job,) = app.store.list()
        executor.pause = 0.1
        assert app.client.post(f"/v1/videos/{job.id}/retry").status_code == 200
        answer = sync(app)
        assert (answer.status_code, answer.content[4:8]) == (200, b"ftyp")


def test_a_job_is_cancelled_once_nobody_waits_for_it(tmp_path: Path) -> None:
    """A client whose connection breaks sends its request again, and keeps its video."""
    served = ServedApp(tmp_path / "server", FakeExecutor(pause=0.2), runs=True)
    with served as app, listening(app) as address:
        place = address.removeprefix("http://")
        host, _, port = place.partition(":")

        def ask() -> socket.socket:
            body = json.dumps(PROMPT)
            client = socket.create_connection((host, int(port)))
            client.sendall(
                f"POST /v1/videos/sync HTTP/1.1\r\nhost: {place}\r\nidempotency-key: one\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
                "".encode()
            )
            return client

        first, second = ask(), ask()
        waiting = app.context.num_waiting
        wait_for(lambda: sum(waiting.values()) == 2)
        assert len(waiting) == 1, "both wait for the same job"
        first.close()
        wait_for(lambda: sum(waiting.values()) == 1)
        assert second.recv(64).startswith(b"HTTP/1.1 200")
        second.close()
