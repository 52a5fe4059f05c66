"""Route that waits for its video and returns the file, as in vLLM-Omni and TensorRT-LLM."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from everyframe.server.errors import ApiError
from everyframe.server.http.access import Principal
from everyframe.server.http.context import Caller, Context, RequestBody, ServerContext, in_thread
from everyframe.server.http.creation import create_job
from everyframe.server.http.event_stream import EventHub, job_snapshot
from everyframe.server.http.routes.content import open_hub
from everyframe.server.queue.jobs import Job

router = APIRouter(tags=["videos"])


@router.post("/v1/videos/sync", response_class=FileResponse)
async def create_video_sync(
    request: Request, context: Context, caller: Caller, body: RequestBody
) -> Any:
    """Make a video and return its file; it is cancelled once all who wait for it disconnect."""
    hub = open_hub(context, caller)  # once: a job that nobody waits for would stay
    after = context.store.last_event
    job, _ = await create_job(context, caller, request, body)
    done = await _wait_for_end(request, context, hub, caller, job, after)
    if done.status != "completed":
        raise _failure(done)
    assert done.file is not None, "a completed job has a file"
    report = done.report
    headers = {
        "x-video-id": done.id,
        "x-model": done.model,
        "x-seed": str(done.request["seed"]),
        "x-inference-time-s": str(report.get("inference_time_s", "")),
        "x-stage-durations": json.dumps(report.get("stage_durations", {})),
        "x-peak-memory-mb": str(report.get("peak_memory_mb") or ""),
    }
    return FileResponse(context.folder.path / done.file, media_type="video/mp4", headers=headers)


async def _wait_for_end(
    request: Request,
    context: ServerContext,
    hub: EventHub,
    caller: Principal,
    job: Job,
    after: int,
) -> Job:
    """The job once it has ended. Raises `ApiError` if the server drains first.

    A repeated request gets the job of the first one, which may have ended long ago: its state comes
    first, then the events after that number.
    """

    def snapshot() -> list[tuple[str, dict[str, Any]]]:
        return job_snapshot(context.store, context.store.get(job.id) or job)

    context.num_waiting[job.id] += 1
    try:
        async for _ in hub.stream(caller, after, video=job.id, snapshot=snapshot):
            if await request.is_disconnected():
                if context.num_waiting[job.id] > 1:
                    break  # another repetition waits for it
                await in_thread(context.dispatcher.cancel, job.id)
    finally:
        context.num_waiting[job.id] -= 1
        if not context.num_waiting[job.id]:
            del context.num_waiting[job.id]
    done: Job | None = await in_thread(context.store.get, job.id)
    if done is None:
        raise ApiError("not_found", f"video {job.id} was deleted", "id")
    if not done.is_final:
        raise ApiError(
            "draining", f"the server shuts down; video {job.id} continues after its restart",
            details={"id": job.id}, headers={"retry-after": "10"},
        )  # fmt: skip
    return done


def _failure(job: Job) -> ApiError:
    error = job.error or {"code": "cancelled", "message": f"video {job.id} was cancelled"}
    details = {"id": job.id, "code": error["code"]}
    code = "invalid_value" if error["code"] in ("input", "media") else "job_failed"
    return ApiError(code, str(error["message"]), details=details)
