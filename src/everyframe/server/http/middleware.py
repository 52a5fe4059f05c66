"""Access middleware of every route: it checks Host, Origin and key, and sets security headers.

Plain ASGI, so that event streams and files pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everyframe.server.errors import ApiError, draining
from everyframe.server.http.access import Access, Principal

#: Headers of every answer. The page runs its own scripts alone, and nobody frames it.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
        "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
}

#: Called at the end of each request: method, route's template, status, seconds.
Observer = Callable[[str, str, int, float], None]


class AccessMiddleware:
    """Refuses requests without access; sets `principal` in the scope of all others."""

    def __init__(self, app: ASGIApp, access: Access, observe: Observer) -> None:
        self._app, self._access, self._observe = app, access, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no WebSockets here
            await send({"type": "websocket.close", "code": 1003})
            return
        began, status, has_begun, method = time.monotonic(), 500, False, scope["method"]
        if method == "HEAD":
            scope, send = _as_get(scope, send)
        request_id = f"req_{uuid.uuid4().hex}"

        async def send_with_headers(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers["x-request-id"] = request_id
                # Else an upgrade of the page would mix old and new modules.
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        try:
            refused = self._refusal(scope)
            if refused is not None:
                answer = JSONResponse(refused.to_json(), refused.status, refused.headers)
                await answer(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server stops, and its grace is over
            if has_begun:
                raise
            refused = draining()
            answer = JSONResponse(refused.to_json(), refused.status, refused.headers)
            await answer(scope, receive, send_with_headers)
        finally:
            # A mount of files and what no route knows are one label each, whatever was asked for.
            route = getattr(scope.get("route"), "path", "") or "other"
            self._observe(method, route, status, time.monotonic() - began)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The error for a request without access; None if it has access."""
        connection = HTTPConnection(scope)
        scope["principal"] = Principal(name="", role="user")
        try:
            self._access.check_host(connection.headers.get("host", ""))
            self._access.check_origin(scope["method"], connection.headers)
            if self._access.needs_caller(scope["path"]):
                scope["principal"] = self._access.principal(connection.headers, connection.cookies)
        except ApiError as error:
            return error
        return None


def _as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """A HEAD request as a GET whose body is not sent: routes are written for GET alone."""
    has_ended = False

    async def send_head(message: Message) -> None:
        nonlocal has_ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not has_ended:
            # The response is complete now, and whatever makes the rest of the body is cancelled.
            has_ended = True
            await send({"type": "http.response.body"})

    return {**scope, "method": "GET"}, send_head
