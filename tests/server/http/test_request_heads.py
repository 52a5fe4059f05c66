"""Heads of requests that come too slowly or have no end, at a real socket, with both parsers."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from uvicorn.protocols.http.h11_impl import H11Protocol

from everyframe.server import process
from everyframe.server.http import request_heads
from everyframe.server.settings import Limits, ServerSettings

QUICK = Limits(header_seconds=0.4, header_bytes=2000)
HEAD = b"POST /x HTTP/1.1\r\nhost: here\r\ncontent-length: 3\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(limits: Limits) -> Iterator[int]:
    """Context: the server of `process.py` around `app`; its port."""
    listening = process.bind("127.0.0.1", 0)
    started = threading.Event()
    config = process._config(app, ServerSettings(limits=limits))
    server = process._Server(config, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert started.wait(20)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        gc.unfreeze()


@pytest.fixture(scope="module", params=["the parser that is installed", "h11"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "h11":
            patched.setattr(request_heads, "AutoHTTPProtocol", H11Protocol)
        else:
            pytest.importorskip("httptools", reason="only h11 is installed")
        with serving(QUICK) as port:
            yield port


@pytest.fixture
def client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        yield client


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while data := client.recv(65536):
        found += data
    return found


def refusal(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_a_connection_that_says_nothing_is_closed(client: socket.socket) -> None:
    began = time.monotonic()
    assert rest(client) == b""
    assert 0.3 < time.monotonic() - began < 5


@pytest.mark.parametrize("start", [b"G", HEAD, b"GET / HTTP/1.1\r\nx: "])
def test_a_head_that_stops_is_given_up(client: socket.socket, start: bytes) -> None:
    client.sendall(start)
    assert refusal(rest(client), 408)["code"] == "too_slow"


def test_a_head_that_drips_is_given_up(client: socket.socket) -> None:
    """Each byte in time, and all of them not: a pause alone is no measure."""
    client.sendall(HEAD)
    began, answer = time.monotonic(), b""
    client.settimeout(0.05)
    while not answer and time.monotonic() - began < 5:
        try:
            client.sendall(b"x")
            answer = client.recv(65536)
        except TimeoutError:
            continue
    client.settimeout(10)
    assert refusal(answer, 408)["code"] == "too_slow"
    assert time.monotonic() - began < 3


def test_a_head_without_end_is_refused(client: socket.socket) -> None:
    client.sendall(HEAD + b"x: ")
    for _ in range(4):
        client.sendall(b"x" * 500)
        time.sleep(0.02)
    assert refusal(client.recv(65536), 413)["code"] == "too_large"


def test_heads_in_time_are_answered_on_one_connection(client: socket.socket) -> None:
    """The time counts for each head by itself, not for the connection nor its pauses."""
    for pause in (0.2, 0.2, 0.6):
        client.sendall(HEAD)
        time.sleep(0.1)
        client.sendall(b"\r\nab")
        time.sleep(pause)
        client.sendall(b"c")
        answer = client.recv(65536)
        while not answer.endswith(b"abc"):
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        time.sleep(pause)
    client.sendall(HEAD[:20])
    assert refusal(rest(client), 408)["code"] == "too_slow", "the second head of a connection too"


def test_a_slow_head_holds_up_nobody_else(port: int, client: socket.socket) -> None:
    client.sendall(HEAD)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
        other.sendall(HEAD + b"\r\nabc")
        assert other.recv(65536).endswith(b"abc")


def test_what_is_there_at_the_start_is_not_searched_for_garbage() -> None:
    gc.unfreeze()
    with serving(QUICK):
        assert gc.get_freeze_count() > 10_000
