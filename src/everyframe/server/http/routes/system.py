"""Routes about the server: queue, machine, doctor, health, readiness, login of the page."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict, replace
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from everyframe._version import __version__
from everyframe.core.errors import EveryframeError
from everyframe.server.errors import ApiError
from everyframe.server.http.access import COOKIE, SESSION_SECONDS
from everyframe.server.http.context import Caller, Context, ServerContext, in_thread
from everyframe.server.http.resources import video_resource
from everyframe.server.monitoring.metrics import MEDIA_TYPE
from everyframe.server.requests.body import read_body

router = APIRouter(tags=["server"])

#: Jobs that the queue's page shows.
_SHOWN = 100
#: Most bytes of a login's body.
_LOGIN_BYTES = 4096


@router.get("/v1/queue")
async def show_queue(context: Context, caller: Caller) -> Any:
    """Number of jobs by status, and the running and waiting jobs in their order."""

    def found() -> dict[str, Any]:
        store = context.store
        jobs = store.list(limit=-1, statuses=("in_progress", "queued"), owner=caller.owner)
        jobs.sort(key=lambda job: (job.status == "queued", -job.priority, job.seq))
        rows = [video_resource(job, store.queue_position(job)) for job in jobs[:_SHOWN]]
        return {"object": "queue", "counts": store.count(caller.owner), "data": rows,
                "is_draining": context.is_draining}  # fmt: skip

    return JSONResponse(await in_thread(found))


@router.get("/v1/system")
async def show_system(context: Context) -> Any:
    """The machine, its warm models, and the free space on the server's disk."""

    facts = await context.facts.get()
    warm = await in_thread(context.executor.describe)
    disk = shutil.disk_usage(context.folder.path)
    return JSONResponse({
        "object": "system",
        "version": __version__,
        "started_at": int(context.started_at),
        "uptime_s": round(time.time() - context.started_at, 1),
        **facts,
        "warm": [
            {**asdict(each), "model": context.models.name_of(each.model),
             "devices": list(each.devices)}
            for each in warm
        ],
        "groups": context.dispatcher.groups,
        "paused_groups": context.dispatcher.paused_groups,
        "disk": {"free_bytes": disk.free, "total_bytes": disk.total},
        "limits": _limits(context),
    })  # fmt: skip


def _limits(context: ServerContext) -> dict[str, Any]:
    limits = context.settings.limits
    return {
        "body_bytes": limits.body_bytes, "num_files": limits.num_files, "queued": limits.queued,
        "queued_of_key": context.settings.queue_limits[1],
        "picture_pixels": limits.picture_pixels, "prompt_letters": limits.prompt_letters,
        "has_sync": context.settings.has_sync, "needs_key": bool(context.settings.keys),
    }  # fmt: skip


@router.get("/v1/doctor")
async def show_doctor(context: Context) -> Any:
    """Findings about this machine, as `everyframe doctor --json` has them."""
    return JSONResponse(await context.doctor.get())


@router.get("/health")
async def show_health() -> Any:
    """Liveness: the process responds."""
    return JSONResponse({"status": "ok", "version": __version__})


class ReadinessReason(BaseModel):
    """Why the server is not ready.

    ``draining``: it shuts down. ``jobs_wait``: no job begins. ``storage_unavailable``: the queue or
    its folder can't be written. ``disk_full``: the disk has too little room. ``groups_paused``: the
    devices of every group fail. All but the first end by themselves once their cause is gone.
    """

    code: Literal["draining", "jobs_wait", "storage_unavailable", "disk_full", "groups_paused"]
    message: str


class Readiness(BaseModel):
    """Whether a new job could be accepted and begin now; without reasons it is ready."""

    status: Literal["ready", "not_ready"]
    reasons: list[ReadinessReason]


@router.get(
    "/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not."}}
)
async def show_readiness(context: Context) -> Any:
    """Readiness: whether a new job could be accepted and begin now, and if not, why."""
    reasons = await in_thread(_reasons, context)
    found = Readiness(status="not_ready" if reasons else "ready", reasons=reasons)
    return JSONResponse(found.model_dump(), 503 if reasons else 200)


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(context: Context) -> Any:
    """Metrics in Prometheus's text format."""
    return Response(await in_thread(context.metrics.text), media_type=MEDIA_TYPE)


def _reasons(context: ServerContext) -> list[ReadinessReason]:
    found: dict[str, str] = {}
    if context.is_draining or context.dispatcher.is_draining:
        found["draining"] = "the server shuts down"
    if context.dispatcher.problem:
        found["jobs_wait"] = f"no job begins: {context.dispatcher.problem}"
    try:
        context.store.is_writable()
    except EveryframeError as error:
        found["storage_unavailable"] = str(error)
    if not os.access(context.folder.path, os.W_OK):
        found.setdefault("storage_unavailable", "the data folder can't be written")
    least = context.settings.min_free_bytes
    # A folder that was removed has none, and is named above.
    free = context.folder.free_bytes() if os.path.isdir(context.folder.path) else least
    if free < least:
        found["disk_full"] = (
            f"the disk of the data folder has {free / 1e9:.1f} GB, and {least / 1e9:.1f} GB are "
            "needed"
        )
    paused = context.dispatcher.paused_groups
    if len(paused) == len(context.dispatcher.groups):
        found["groups_paused"] = f"the devices of {', '.join(paused)} do not work; jobs wait"
    return [
        ReadinessReason(code=code, message=context.folder.without_place(text))
        for code, text in found.items()
    ]


@router.post("/v1/session")
async def begin_session(request: Request, context: Context) -> Any:
    """Log a page in: the key is in the body, a session cookie in the response."""
    if not context.settings.keys:
        return JSONResponse({"object": "session", "name": "", "role": "admin"})
    context.logins.take("login")
    # Anybody may send one: no upload's memory and time are spent on it.
    body = await read_body(request, replace(context.settings.limits, body_bytes=_LOGIN_BYTES))
    given = body.fields.get("key")
    if not isinstance(given, str) or not given:
        raise ApiError("missing_required_parameter", "key is missing", "key")
    key = context.access.find_key(given)
    if key is None:
        raise ApiError("invalid_api_key", "the key is wrong")
    answer = JSONResponse({"object": "session", "name": key.name, "role": key.role})
    answer.set_cookie(
        COOKIE, context.access.session_cookie(key), max_age=SESSION_SECONDS, httponly=True,
        samesite="strict", secure=request.url.scheme == "https", path="/",
    )  # fmt: skip
    return answer


@router.delete("/v1/session")
async def end_session() -> Any:
    """Log a page out."""
    answer = JSONResponse({"object": "session", "deleted": True})
    answer.delete_cookie(COOKIE, path="/")
    return answer
