"""Routes of a video's files and events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import FileResponse, StreamingResponse

from everyframe.server.context import Context, ServerContext, Who, in_thread
from everyframe.server.errors import ApiError
from everyframe.server.event_stream import HEADERS, MEDIA_TYPE, EventHub, job_snapshot
from everyframe.server.resources import VARIANTS

router = APIRouter(tags=["videos"])


@router.get("/v1/videos/{video_id}/content", response_class=FileResponse)
async def download_content(
    video_id: str,
    context: Context,
    who: Who,
    variant: str = "video",
) -> Any:
    """The video, or one of its variants; ranges are answered."""
    job = await context.job(video_id, who)
    if variant not in VARIANTS:
        raise ApiError(
            "invalid_value", f"variant must be one of {', '.join(VARIANTS)}, got {variant[:80]!r}",
            "variant",
        )  # fmt: skip
    if job.status != "completed":
        raise ApiError("not_ready", f"video {video_id} is {job.status}; it has no content yet")
    name, kind = VARIANTS[variant]
    path = context.folder.video(video_id) / name
    if not await in_thread(path.is_file):
        raise ApiError("not_found", f"the files of video {video_id} were deleted")
    ending = name.rpartition(".")[2]
    return FileResponse(
        path,
        media_type=kind,
        filename=f"{video_id}{'' if variant == 'video' else f'-{variant}'}.{ending}",
        content_disposition_type="inline",
        headers={"cache-control": "private, max-age=3600"},
    )


@router.get("/v1/videos/{video_id}/events", response_class=StreamingResponse)
async def video_events(
    video_id: str,
    context: Context,
    who: Who,
    preview: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int | None, Query(ge=0)] = None,
) -> Any:
    """Events of a job as they happen, until it is done; `Last-Event-ID` goes on after a break."""
    job = await context.job(video_id, who)
    hub = open_hub(context)
    begin = _number(last_event_id) if after is None else after
    last = context.store.last_event

    def snapshot() -> list[tuple[str, dict[str, Any]]]:
        now = context.store.get(video_id) or job
        return job_snapshot(context.store, now) if begin is None or now.is_final else []

    stream = hub.stream(
        last if begin is None else begin, video=video_id, owner=who.owner, snapshot=snapshot,
        with_previews=preview,
    )  # fmt: skip
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)


@router.get("/v1/events", response_class=StreamingResponse)
async def all_events(
    context: Context,
    who: Who,
    preview: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int | None, Query(ge=0)] = None,
) -> Any:
    """Events of all jobs of the key as they happen; each names its video."""
    begin = _number(last_event_id) if after is None else after

    def snapshot() -> list[tuple[str, dict[str, Any]]]:
        if begin is not None:
            return []
        jobs = context.store.list(
            limit=1000, order="asc", statuses=("queued", "in_progress"), owner=who.owner
        )
        return [event for job in jobs for event in job_snapshot(context.store, job)]

    stream = open_hub(context).stream(
        context.store.last_event if begin is None else begin, video=None, owner=who.owner,
        snapshot=snapshot, with_previews=preview,
    )  # fmt: skip
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)


def open_hub(context: ServerContext) -> EventHub:
    """The hub, for one more stream. Raises `ApiError` if there are too many, or while draining."""
    hub = context.hub
    assert hub is not None, "the application runs"
    context.check_not_draining()
    if hub.num_streams >= context.settings.limits.event_streams:
        raise ApiError(
            "rate_limited", "too many event streams are open; close some",
            headers={"retry-after": "5"},
        )  # fmt: skip
    return hub


def _number(text: str | None) -> int | None:
    """The number of an event; a header that is none counts as no header."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
