"""Limits on the head of a request: its request line and headers, in time and in bytes.

Uvicorn waits forever for the rest of a head. A few thousand slow connections (Slowloris) would thus
use up the process's file descriptors. `body.py` limits bodies.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from everyframe.server.errors import ApiError
from everyframe.server.settings import Limits


def limited_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol class for the installed parser, with these limits."""

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        """A connection. A head begins with the connection, or with the first byte after a body."""

        _timer: asyncio.TimerHandle | None = None
        _last_cycle: Any = None
        _size = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not self._last_cycle:  # uvicorn makes one of a whole head
                self._last_cycle = self.cycle
                self._end_head()
            elif self.cycle is None or self.cycle.response_complete:
                if self._timer is None:
                    self._begin_head()
                self._size += len(data)
                if self._size > limits.header_bytes:
                    kib = limits.header_bytes // 1024
                    self._refuse("too_large", f"the headers are larger than {kib} KiB; send less")

        def _begin_head(self) -> None:
            self._size = 0
            self._timer = self.loop.call_later(limits.header_seconds, self._give_up)

        def _end_head(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if self._size:
                seconds = limits.header_seconds
                self._refuse("too_slow", f"the headers did not come within {seconds:g} seconds")
            else:
                self.transport.close()

        def _refuse(self, code: str, message: str) -> None:
            """Answer in the envelope and close: no route has heard of this request."""
            self._end_head()
            if self.transport.is_closing():
                return
            self.transport.write(_answer(ApiError(code, message)))
            self.transport.close()

    return LimitedProtocol


def _answer(error: ApiError) -> bytes:
    """The last response of a connection."""
    body = json.dumps(error.to_json()).encode()
    head = (
        f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
