"""Fetch pictures and videos that clients name by URL, from allowed hosts only.

The host's name is resolved once and the connection uses that address, so a later DNS answer (DNS
rebinding) has no effect. Private, loopback and link-local addresses are refused. It uses plain
http.client, which ignores proxies of the environment.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from everyframe.core.bytes import format_bytes
from everyframe.server.errors import ApiError

#: Seconds for one connection or read, and for the whole of a fetch.
_READ_SECONDS, _WHOLE_SECONDS = 10.0, 60.0
_MOST_REDIRECTS = 3
_CHUNK = 1 << 16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

#: The addresses of IPv6 that are given out. Outside of it are private ones by several names, and
#: those that stand for addresses of IPv4; Python's tables know some of them, by its version.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")

Resolve = Callable[[str, int], list[str]]
Connect = Callable[[str, str, int], http.client.HTTPConnection]


def resolve_name(host: str, port: int) -> list[str]:
    """Addresses of a host. Raises `OSError` if the name is unknown."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to one address; its certificate must be valid for the host's name."""

    def __init__(self, host: str, address: str, port: int) -> None:
        self._tls = ssl.create_default_context()
        super().__init__(host, port, timeout=_READ_SECONDS, context=self._tls)
        self._address = address

    def connect(self) -> None:
        """Connect to the address that was checked."""
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


@dataclass(frozen=True)
class UrlFetcher:
    """Fetches files of at most `most_bytes` from `hosts`; without hosts it refuses every URL."""

    hosts: Collection[str]
    most_bytes: int
    resolve: Resolve = resolve_name
    connect: Connect = _PinnedConnection

    def fetch(self, url: str, param: str) -> bytes:
        """The file at a URL.

        Raises:
            ApiError: the host or its address is not allowed, or the file can't be fetched.
        """
        if not self.hosts:
            raise ApiError(
                "not_supported", f"{param}: this server fetches no URLs; send the file", param
            )
        ends = time.monotonic() + _WHOLE_SECONDS
        first = current = self._check_url(url, param)
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                answer = self._get(current, ends, param)
            except (OSError, http.client.HTTPException, ValueError) as error:
                text = f"{param}: {current.hostname} can't be read: {error}"
                raise ApiError("invalid_value", text, param) from None
            if isinstance(answer, bytes):
                return answer
            current = self._check_url(urljoin(current.geturl(), answer), param)
            if current.hostname != first.hostname:
                text = f"{param}: {first.hostname} redirects to another host, which is not followed"
                raise ApiError("not_supported", text, param)
        raise ApiError("invalid_value", f"{param}: too many redirects", param)

    def _check_url(self, url: str, param: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            port = parts.port or 443
        except ValueError as error:
            raise ApiError("invalid_value", f"{param} is no URL: {error}", param) from None
        if parts.scheme != "https" or parts.username or parts.password or port != 443:
            text = f"{param}: only https URLs without user and port are fetched"
            raise ApiError("not_supported", text, param)
        allowed = {each.lower() for each in self.hosts}
        if (parts.hostname or "").lower() not in allowed:
            text = f"{param}: host {str(parts.hostname)[:80]!r} is not allowed; send the file"
            raise ApiError("not_supported", text, param)
        return parts

    def _get(self, parts: SplitResult, ends: float, param: str) -> bytes | str:
        """The body of a response, or the URL that it redirects to."""
        host = parts.hostname or ""
        connection = self.connect(host, self._address(host, param), 443)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"accept": "image/*, video/*"})
            answer = connection.getresponse()
            if answer.status in _REDIRECTS:
                return answer.getheader("location", "")
            if answer.status != 200:
                raise http.client.HTTPException(f"status {answer.status}")
            return self._body(answer, ends, param)
        finally:
            connection.close()

    def _body(self, answer: http.client.HTTPResponse, ends: float, param: str) -> bytes:
        data = bytearray()
        while chunk := answer.read1(_CHUNK):
            data += chunk
            if len(data) > self.most_bytes:
                text = f"{param} is larger than {format_bytes(self.most_bytes)}"
                raise ApiError("too_large", text, param)
            if time.monotonic() > ends:
                raise http.client.HTTPException(f"no end within {_WHOLE_SECONDS:.0f} seconds")
        if answer.length:  # `read1` ends in silence where the connection does
            raise http.client.HTTPException(f"the connection ended {answer.length} bytes early")
        return bytes(data)

    def _address(self, host: str, param: str) -> str:
        """The first address of a host, all of whose addresses must be public."""
        found = self.resolve(host, 443)
        if not found or not all(_is_public(each) for each in found):
            text = f"{param}: host {host!r} has a private address, which is not fetched from"
            raise ApiError("not_supported", text, param)
        return found[0]


def _is_public(address: str) -> bool:
    read = ipaddress.ip_address(address.partition("%")[0])
    # An address of IPv4 within one of IPv6.
    read = getattr(read, "ipv4_mapped", None) or read
    inner = getattr(read, "sixtofour", None) or read
    is_given_out = read.version == 4 or read in _GLOBAL_UNICAST
    return is_given_out and read.is_global and inner.is_global and not read.is_multicast
