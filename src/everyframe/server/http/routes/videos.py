"""Routes of videos: create, list, retrieve, cancel, delete, and jobs made from another video."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from everyframe.server.errors import ApiError
from everyframe.server.http.context import Caller, Context, RequestBody, ServerContext, in_thread
from everyframe.server.http.creation import create_job
from everyframe.server.http.resources import (
    DeletedVideo,
    VideoList,
    VideoResource,
    poll_after_ms,
    video_resource,
)
from everyframe.server.queue.jobs import RETRIED, Job
from everyframe.server.requests.body import Body
from everyframe.server.requests.client_fields import OTHER_NAMES

router = APIRouter(prefix="/v1/videos", tags=["videos"])

#: Seconds that a deletion waits for a running job to stop.
_STOP_SECONDS = 10.0


def answer(job: Job, position: int | None) -> JSONResponse:
    """The response for a job, with the time until a client should poll again."""
    headers = {}
    if not job.is_final:
        headers["openai-poll-after-ms"] = str(poll_after_ms(job, position, time.time()))
    return JSONResponse(video_resource(job, position), headers=headers)


@router.post("", response_model=VideoResource)
async def create_video(
    request: Request, context: Context, caller: Caller, body: RequestBody
) -> Any:
    """Add a job to the queue."""
    return answer(*await create_job(context, caller, request, body))


@router.get("", response_model=VideoList)
async def list_videos(
    context: Context,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: str = "desc",
    status: str | None = None,
) -> Any:
    """Jobs of the key, newest first; `after` is the last id of the page before."""
    statuses = tuple(filter(None, (status or "").split(",")))
    jobs = await in_thread(
        context.store.list,
        limit=limit + 1,
        after=after,
        order=order,
        statuses=statuses,
        owner=caller.owner,
    )
    page = jobs[:limit]

    def rows() -> list[dict[str, Any]]:
        return [video_resource(job, context.store.queue_position(job)) for job in page]

    return JSONResponse({
        "object": "list",
        "data": await in_thread(rows),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(jobs) > limit,
    })  # fmt: skip


@router.get("/{video_id}", response_model=VideoResource)
async def retrieve_video(video_id: str, context: Context, caller: Caller) -> Any:
    """A job in any status."""
    return answer(*await context.placed_job(video_id, caller))


@router.delete("/{video_id}", response_model=DeletedVideo)
async def delete_video(video_id: str, context: Context, caller: Caller) -> Any:
    """Delete a job with its files; a running job is cancelled first."""
    await context.job(video_id, caller)
    is_deleted = await in_thread(context.store.delete, video_id)
    if not is_deleted:  # it is running
        await in_thread(context.dispatcher.cancel, video_id, _STOP_SECONDS)
        is_deleted = await in_thread(context.store.delete, video_id)
    if not is_deleted:
        raise ApiError(
            "conflict", "the job is still stopping; delete it again in a moment",
            headers={"retry-after": "5"},
        )  # fmt: skip
    return JSONResponse(DeletedVideo(id=video_id).model_dump())


@router.post("/{video_id}/cancel", response_model=VideoResource)
async def cancel_video(video_id: str, context: Context, caller: Caller) -> Any:
    """Cancel a job; a running one stops at its next step and its run is kept."""
    await context.job(video_id, caller)
    await in_thread(context.dispatcher.cancel, video_id)
    return answer(*await context.placed_job(video_id, caller))


@router.post("/{video_id}/retry", response_model=VideoResource)
async def retry_video(video_id: str, context: Context, caller: Caller) -> Any:
    """Put a failed or cancelled job back into the queue; it resumes its run."""
    context.check_not_draining()
    job = await context.job(video_id, caller)
    if job.status not in RETRIED:
        raise ApiError(
            "conflict", f"the job is {job.status}; failed and cancelled jobs can be retried"
        )
    context.creations.take(caller.name)
    again = await in_thread(context.store.retry, video_id, *context.settings.queue_limits)
    return answer(again, await in_thread(context.store.queue_position, again))


@router.post("/{video_id}/remix", response_model=VideoResource)
async def remix_video(
    video_id: str,
    request: Request,
    context: Context,
    caller: Caller,
    body: RequestBody,
) -> Any:
    """Repeat a request with its seed and a new prompt; any other field may be changed too."""
    job = await context.job(video_id, caller)
    if not body.fields.get("prompt"):
        raise ApiError(
            "missing_required_parameter", "prompt is missing; say what to show", "prompt"
        )
    made = await create_job(context, caller, request, body, base=job.request, parent=job.id)
    return answer(*made)


@router.post("/extensions", response_model=VideoResource)
async def extend_video(
    request: Request, context: Context, caller: Caller, body: RequestBody
) -> Any:
    """Continue a video: a file, or the id of one of ours."""
    return await _of_video(request, context, caller, body)


@router.post("/edits", response_model=VideoResource)
async def edit_video(request: Request, context: Context, caller: Caller, body: RequestBody) -> Any:
    """Change a video by `edit_strength`, where the model can."""
    if "edit_strength" not in body.fields:
        body = Body({"edit_strength": 0.5, **body.fields}, body.files, body.digest)
    try:
        return await _of_video(request, context, caller, body)
    except ApiError as error:
        if error.code == "invalid_value" and error.param == "edit_strength":
            raise ApiError("not_supported", str(error), "edit_strength") from None
        raise


async def _of_video(
    request: Request, context: ServerContext, caller: Caller, body: Body
) -> JSONResponse:
    """Create a job that begins with a video."""
    if not any(OTHER_NAMES.get(name, name) == "extend" for name in (*body.fields, *body.files)):
        raise ApiError(
            "missing_required_parameter", "video is missing; send a file, or an id", "video"
        )
    given = body.fields.get("video")
    parent = None
    if isinstance(given, dict) and "id" in given:
        job = await context.job(str(given["id"]), caller)
        if job.file is None:
            raise ApiError("not_ready", f"video {job.id} is {job.status}; wait for it", "video")
        file = context.folder.path / job.file
        data = await in_thread(file.read_bytes)
        rest = {name: value for name, value in body.fields.items() if name != "video"}
        body = Body(rest, {**body.files, "video": data}, body.digest)
        parent = job.id
    return answer(*await create_job(context, caller, request, body, parent=parent))
