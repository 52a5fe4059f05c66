"""Build the HTTP application: routes, error envelope, middleware, and a server's context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from everyframe._version import __version__
from everyframe.core.errors import EveryframeError
from everyframe.core.options import shown
from everyframe.engine.workers.executor import Executor
from everyframe.server.dispatch.dispatcher import Dispatcher
from everyframe.server.errors import ApiError, api_error
from everyframe.server.http.context import ServerContext
from everyframe.server.http.creation import default_plan
from everyframe.server.http.event_stream import EventHub
from everyframe.server.http.middleware import AccessMiddleware
from everyframe.server.http.openapi import DocumentedApp
from everyframe.server.http.routes import catalog, content, sync, system, videos
from everyframe.server.monitoring.metrics import Metrics
from everyframe.server.monitoring.traces import JobTraces
from everyframe.server.queue.job_follower import JobFollower
from everyframe.server.queue.store import JobStore
from everyframe.server.settings import ServerSettings

_log = logging.getLogger(__name__)

#: Files of the web page.
STATIC = Path(__file__).parents[1] / "static"


def create_app(
    store: JobStore, dispatcher: Dispatcher, executor: Executor, settings: ServerSettings
) -> FastAPI:
    """The application of a server. `app.state.context.begin_drain()` ends its event streams.

    Raises:
        InputError: a model of the settings is not on this disk.
    """
    context = ServerContext(settings, store, store.folder, dispatcher, executor)

    traces = JobTraces(store) if settings.has_traces else None
    followers: list[Metrics | JobTraces] = [context.metrics]
    if traces is not None:
        followers.append(traces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.hub = EventHub(store, dispatcher)
        follower = JobFollower(store, [each.follow for each in followers])
        follower.start()
        ahead = asyncio.create_task(_plan_ahead(context)) if settings.plans_ahead else None
        try:
            yield
        finally:
            context.begin_drain()
            if ahead is not None:
                ahead.cancel()
            await anyio.to_thread.run_sync(follower.stop)
            if traces is not None:
                await anyio.to_thread.run_sync(traces.close)

    app = routed_app(lifespan, has_sync=settings.has_sync)
    app.state.context = context
    if STATIC.is_dir():
        app.mount("/", StaticFiles(directory=STATIC, html=True), name="page")
    _add_error_handlers(app)
    observe = context.metrics.observe_request
    app.add_middleware(AccessMiddleware, access=context.access, observe=observe)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id"],
            expose_headers=["openai-poll-after-ms", "retry-after", "x-request-id"],
        )
    return app


async def _plan_ahead(context: ServerContext) -> None:
    """Plan the default model's default video, so that the first request needn't wait for it."""
    try:
        await default_plan(context)
    except ApiError as error:
        _log.info("the default model is not planned ahead: %s", error)


def routed_app(lifespan: Any = None, *, has_sync: bool = True) -> DocumentedApp:
    """The routes without a server behind them: enough for the OpenAPI document."""
    app = DocumentedApp(
        title="Everyframe",
        version=__version__,
        summary="Video diffusion behind a durable queue.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    # Before the routes of one video, whose id would be "sync".
    for routes in (*((sync,) if has_sync else ()), videos, content, catalog, system):
        app.include_router(routes.router)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the envelope of `errors.py`."""

    async def of_api(request: Request, error: Any) -> JSONResponse:
        found, context = error.to_json(), request.app.state.context
        found["error"]["message"] = context.folder.without_place(found["error"]["message"])
        return JSONResponse(found, error.status, error.headers)

    async def of_library(request: Request, error: Any) -> JSONResponse:
        return await of_api(request, api_error(error))

    async def of_system(request: Request, error: Any) -> JSONResponse:
        _log.error("%s %s: %s", request.method, request.url.path, error)
        text = f"the server can't read or write its files: {error.strerror or error}"
        again = {"retry-after": "30"}
        return await of_api(request, ApiError("storage_unavailable", text, headers=again))

    async def of_framework(request: Request, error: Any) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_value")
        text = f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}"
        return await of_api(request, ApiError(code, text, headers=error.headers))

    async def of_validation(request: Request, error: Any) -> JSONResponse:
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        words = f"{problem['msg'][:1].lower()}{problem['msg'][1:]}"
        text = f"{name}: {words}, got {shown(problem['input'])}"
        return await of_api(request, ApiError("invalid_value", text, name))

    async def of_us(request: Request, error: Any) -> JSONResponse:
        return await of_api(request, ApiError("server_error", "the server met an error of its own"))

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(EveryframeError, of_library)
    app.add_exception_handler(OSError, of_system)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(Exception, of_us)
