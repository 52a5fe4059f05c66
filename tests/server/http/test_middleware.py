"""What happens around every route: as the server stops, and for requests for headers alone."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.server.http.access import Access
from everyframe.server.http.middleware import AccessMiddleware
from everyframe.server.settings import ServerSettings
from helpers.server_app import ServedApp, listening

SCOPE = {"type": "http", "method": "POST", "path": "/v1/videos", "query_string": b"",
         "headers": [(b"host", b"127.0.0.1:8000")]}  # fmt: skip


def stopped(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client gets whose request is ended by the server's stop, after these messages."""

    async def ended() -> list[dict[str, Any]]:
        waits, sent = asyncio.Event(), []

        async def route(scope: Any, receive: Any, send: Any) -> None:
            for each in messages:
                await send(each)
            waits.set()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        app = AccessMiddleware(route, Access(ServerSettings(), b"a key"), lambda *seen: None)
        task = asyncio.create_task(app(dict(SCOPE), None, send))  # type: ignore[arg-type]
        await waits.wait()
        task.cancel("timeout graceful shutdown exceeded")
        await asyncio.wait([task])
        assert task.cancelled() == bool(messages)
        return sent

    return asyncio.run(ended())


def test_a_request_that_outlasts_the_server_is_answered_in_the_envelope() -> None:
    """It waits for a plan, say; the server that comes next can answer it."""
    start, body = stopped([])
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"retry-after"] == b"10"
    assert headers[b"x-request-id"]
    error = json.loads(body["body"])["error"]
    assert (error["code"], error["type"]) == ("draining", "server_error")


def test_an_answer_that_has_begun_is_cut_off() -> None:
    begun = {"type": "http.response.start", "status": 200, "headers": []}
    assert stopped([begun]) == [begun]


def test_head_is_get_without_a_body(tmp_path: Path) -> None:
    """An event stream too: it ends at once, so that the connection serves the next request."""
    with ServedApp(tmp_path / "server") as app, listening(app) as address:
        made, waits = (
            app.client.post("/v1/videos", json={"prompt": "a red circle"}).json()["id"]
            for _ in range(2)
        )
        size = len(app.finish(made)["video.mp4"])
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)

        def head(path: str, **headers: str) -> tuple[int, http.client.HTTPMessage]:
            connection.request("HEAD", path, headers=headers)
            answer = connection.getresponse()
            assert answer.read() == b""
            return answer.status, answer.headers

        for path in ("/health", "/v1/queue", "/v1/videos", f"/v1/videos/{waits}", "/"):
            status, headers = head(path)
            assert (status, int(headers["content-length"]) > 0) == (200, True), path
        status, headers = head(f"/v1/videos/{made}/content")
        assert (status, headers["content-length"]) == (200, str(size))
        assert headers["content-type"] == "video/mp4"
        status, headers = head(f"/v1/videos/{made}/content", range="bytes=0-9")
        assert (status, headers["content-length"]) == (206, "10")
        status, headers = head(f"/v1/videos/{waits}/events")
        assert (status, headers["content-type"][:17]) == (200, "text/event-stream")
        assert [head(path)[0] for path in ("/nothing", "/v1/videos/x")] == [404, 404]
        connection.close()
