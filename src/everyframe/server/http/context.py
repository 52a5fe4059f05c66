"""Context of one server's routes: its store, dispatcher, models, caches and limits."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request

from everyframe.core.errors import EveryframeError
from everyframe.engine.workers.executor import Executor
from everyframe.server.data_folder import DataFolder, is_video_id
from everyframe.server.dispatch.dispatcher import Dispatcher
from everyframe.server.errors import ApiError, api_error, draining
from everyframe.server.http.access import Access, Principal
from everyframe.server.http.event_stream import EventHub
from everyframe.server.http.rate_limits import RateLimit
from everyframe.server.machine import (
    DOCTOR_SECONDS,
    FACTS_SECONDS,
    CachedResult,
    read_facts,
    run_doctor,
)
from everyframe.server.monitoring.metrics import Metrics
from everyframe.server.queue.job_adder import JobAdder
from everyframe.server.queue.jobs import Job
from everyframe.server.queue.store import JobStore
from everyframe.server.requests.body import Body, read_body
from everyframe.server.requests.media_inputs import StoredMedia, bytes_of_data_url, store_media
from everyframe.server.requests.models import LoraRegistry, ModelRegistry
from everyframe.server.requests.plans import PlanCache
from everyframe.server.requests.request_parser import RequestParser
from everyframe.server.requests.url_inputs import UrlFetcher
from everyframe.server.settings import ServerSettings

#: Parameters of lists, which the store checks.
_QUERIED = ("after", "order", "status")
#: Attempts to log in, by all clients together.
_LOGINS_A_MINUTE = 60


@dataclass
class ServerContext:
    """The parts of one server. `hub` exists while the application runs.

    `num_waiting` counts the open requests that wait for a job's file, by its id.
    """

    settings: ServerSettings
    store: JobStore
    folder: DataFolder
    dispatcher: Dispatcher
    executor: Executor
    models: ModelRegistry = field(init=False)
    loras: LoraRegistry = field(init=False)
    access: Access = field(init=False)
    adder: JobAdder = field(init=False)
    plans: PlanCache = field(init=False)
    creations: RateLimit = field(init=False)
    logins: RateLimit = field(init=False)
    urls: UrlFetcher = field(init=False)
    metrics: Metrics = field(init=False)
    facts: CachedResult = field(init=False)
    doctor: CachedResult = field(init=False)
    parser: RequestParser = field(init=False)
    hub: EventHub | None = None
    num_waiting: Counter[str] = field(default_factory=Counter)
    started_at: float = field(default_factory=time.time)
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.models = ModelRegistry(self.settings.models)
        self.loras = LoraRegistry(self.settings.loras)
        self.access = Access(self.settings, self.folder.session_key())
        self.adder = JobAdder(self.store)
        self.plans = PlanCache(self.executor, self.folder)
        limits = self.settings.limits
        self.creations = RateLimit(limits.creations_a_minute if self.settings.limits_keys else None)
        self.logins = RateLimit(_LOGINS_A_MINUTE)
        self.urls = UrlFetcher(self.settings.url_hosts, limits.body_bytes)
        self.metrics = Metrics(self.store, self.dispatcher)
        self.facts = CachedResult(read_facts, FACTS_SECONDS)
        self.doctor = CachedResult(run_doctor, DOCTOR_SECONDS)
        self.parser = RequestParser(self.models, self.loras, limits, self.read_media)

    def begin_drain(self) -> None:
        """Accept no more jobs, and end the event streams. May be called from any thread."""
        self.is_draining = True
        if self.hub is not None:
            self.hub.close()

    def check_not_draining(self) -> None:
        """Raise `ApiError` while the server shuts down."""
        if self.is_draining:
            raise draining()

    def read_media(self, param: str, wanted: str, value: Any) -> StoredMedia:
        """Store the picture or video of a field: an upload, a data URL or an allowed URL."""
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
            if isinstance(value, dict):
                value = value.get("url")
        limits = self.settings.limits
        if isinstance(value, bytes):
            return store_media(value, param, wanted, self.folder, limits)
        if isinstance(value, str) and value.startswith("data:"):
            data = bytes_of_data_url(value, param, limits)
            return store_media(data, param, wanted, self.folder, limits)
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            data = self.urls.fetch(value, param)
            return store_media(data, param, wanted, self.folder, limits)
        raise ApiError(
            "invalid_value",
            f"{param} must be a file of a multipart body, or a data URL",
            param,
        )

    async def job(self, id: str, caller: Principal) -> Job:  # noqa: A002
        """The job of that id, if the caller may see it. Raises `ApiError` otherwise."""
        return (await self.placed_job(id, caller))[0]

    async def placed_job(self, id: str, caller: Principal) -> tuple[Job, int | None]:  # noqa: A002
        """The job as `job` returns it, and the number of jobs before it if it is queued."""

        def found() -> tuple[Job, int | None] | None:
            job = self.store.get(id, caller.owner)
            return None if job is None else (job, self.store.queue_position(job))

        placed: tuple[Job, int | None] | None = None
        if is_video_id(id):
            placed = await in_thread(found)
        if placed is None:
            raise ApiError("not_found", f"there is no video {id[:80]!r}", "id")
        return placed


async def in_thread(function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a blocking function in a thread; the library's errors become `ApiError`."""

    def call() -> Any:
        return function(*arguments, **named)

    try:
        return await anyio.to_thread.run_sync(call)
    except EveryframeError as error:
        raise api_error(error, _QUERIED) from error


async def context_of(request: Request) -> ServerContext:
    """The context of the application that handles the request."""
    found: ServerContext = request.app.state.context
    return found


async def principal_of(request: Request) -> Principal:
    """The caller, as the middleware identified it."""
    found: Principal = request.scope["principal"]
    return found


async def body_of(request: Request) -> Body:
    """The body of the request."""
    return await read_body(request, (await context_of(request)).settings.limits)


# Coroutines, as FastAPI calls a function in a thread, and a switch costs more than these do.
Context = Annotated[ServerContext, Depends(context_of)]
Caller = Annotated[Principal, Depends(principal_of)]
RequestBody = Annotated[Body, Depends(body_of)]
