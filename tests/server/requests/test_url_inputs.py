"""URLs of clients: allowed hosts alone, one resolution, public addresses, limits."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.server.errors import ApiError
from everyframe.server.requests import url_inputs
from everyframe.server.requests.url_inputs import UrlFetcher, resolve_name

PUBLIC = "93.184.216.34"


class Peer:
    """A plain HTTP server on loopback that stands for the host, whatever address is asked for."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked: list[tuple[str, str]] = []
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def connect(self, host: str, address: str, port: int) -> http.client.HTTPConnection:
        self.asked.append((host, address))
        return http.client.HTTPConnection(*self._listener.getsockname(), timeout=5)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                self.requests.append(peer.recv(65536))
                peer.sendall(self._answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer() -> Iterator[Callable[[bytes], Peer]]:
    made: list[Peer] = []

    def start(answer: bytes) -> Peer:
        made.append(Peer(answer))
        return made[-1]

    yield start
    for each in made:
        each.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def refusal(fetcher: UrlFetcher, url: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        fetcher.fetch(url, "image")
    return caught.value


def fetcher(peer: Peer, *addresses: str, **named: Any) -> UrlFetcher:
    answers = iter([[each] for each in addresses])
    return UrlFetcher(
        ("example.org",), named.pop("most_bytes", 1000), lambda host, port: next(answers),
        peer.connect, **named,
    )  # fmt: skip


def test_a_file_of_an_allowed_host_is_fetched(peer: Callable[[bytes], Peer]) -> None:
    there = peer(ok(b"picture"))
    assert fetcher(there, PUBLIC).fetch("https://example.org/a.png?b", "image") == b"picture"
    assert there.requests[0].startswith(b"GET /a.png?b HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "url",
    ["http://example.org/", "https://example.org:8443/", "https://me@example.org/",
     "https://example.com/", "https://example.org.evil.com/", "https://127.0.0.1/", "file:///x",
     "https://evil.com#example.org", "https://[::1]/"],
)  # fmt: skip
def test_only_https_of_allowed_hosts_is_fetched(peer: Callable[[bytes], Peer], url: str) -> None:
    there = peer(ok(b""))
    assert refusal(fetcher(there, PUBLIC), url).code == "not_supported"
    assert there.asked == []


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "::1",
     "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "224.0.0.1",
     "100.64.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "::127.0.0.1",
     "::ffff:0:127.0.0.1", "5f00::1"],
)  # fmt: skip
def test_private_addresses_are_not_connected_to(
    peer: Callable[[bytes], Peer], address: str
) -> None:
    there = peer(ok(b"secret"))
    assert "private" in str(refusal(fetcher(there, address), "https://example.org/"))
    assert there.asked == []


def test_one_public_address_among_private_ones_is_not_enough() -> None:
    several = UrlFetcher(("example.org",), 10, lambda host, port: [PUBLIC, "127.0.0.1"])
    assert "private" in str(refusal(several, "https://example.org/"))


def test_a_name_is_resolved_once_and_that_address_is_used(peer: Callable[[bytes], Peer]) -> None:
    """DNS rebinding: a second question would be answered by 127.0.0.1."""
    there = peer(ok(b"x"))
    fetcher(there, PUBLIC, "127.0.0.1").fetch("https://example.org/", "image")
    assert there.asked == [("example.org", PUBLIC)]


def test_the_real_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def connect(address: Any, timeout: Any) -> Any:
        seen.append(address)
        raise OSError("not now")

    monkeypatch.setattr(url_inputs.socket, "create_connection", connect)
    real = UrlFetcher(("example.org",), 10, lambda host, port: [PUBLIC])
    assert "not now" in str(refusal(real, "https://example.org/"))
    assert seen == [(PUBLIC, 443)]
    assert resolve_name("127.0.0.1", 443) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("place", "words"),
    [("https://example.com/", "not allowed"), ("http://example.org/", "https"),
     ("https://169.254.169.254/", "not allowed"), ("/again", "too many redirects")],
)  # fmt: skip
def test_redirects_stay_at_the_host(peer: Callable[[bytes], Peer], place: str, words: str) -> None:
    there = peer(
        b"HTTP/1.1 302 Found\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % place.encode()
    )
    assert words in str(refusal(fetcher(there, *[PUBLIC] * 9), "https://example.org/"))


def test_a_redirect_is_checked_again(peer: Callable[[bytes], Peer]) -> None:
    there = peer(b"HTTP/1.1 302 Found\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n")
    assert "private" in str(refusal(fetcher(there, PUBLIC, "10.0.0.1"), "https://example.org/"))
    assert len(there.asked) == 1


def test_sizes_are_limited_whatever_the_header_says(peer: Callable[[bytes], Peer]) -> None:
    there = peer(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000)
    assert refusal(fetcher(there, PUBLIC), "https://example.org/").code == "too_large"


@pytest.mark.parametrize("length", [b"content-length: 9", b"transfer-encoding: chunked"])
def test_a_file_that_is_cut_off_is_refused(peer: Callable[[bytes], Peer], length: bytes) -> None:
    there = peer(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % length + b"9\r\nx")
    error = refusal(fetcher(there, PUBLIC), "https://example.org/")
    assert error.code == "invalid_value"
    assert "example.org can't be read" in str(error)


def test_slow_hosts_are_given_up(
    peer: Callable[[bytes], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_inputs, "_WHOLE_SECONDS", -1.0)
    there = peer(ok(b"x"))
    assert "no end within" in str(refusal(fetcher(there, PUBLIC), "https://example.org/"))


def test_without_allowed_hosts_nothing_is_fetched() -> None:
    none = UrlFetcher((), 10, lambda host, port: pytest.fail("it was resolved"))
    assert refusal(none, "https://example.org/").code == "not_supported"
