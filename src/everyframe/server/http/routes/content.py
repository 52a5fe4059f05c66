"""Routes of a video's files and events."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from everyframe.server.errors import ApiError
from everyframe.server.http.access import Principal
from everyframe.server.http.content_variants import frames_archive, preview_bytes
from everyframe.server.http.context import Caller, Context, ServerContext, in_thread
from everyframe.server.http.event_stream import HEADERS, MEDIA_TYPE, EventHub, job_snapshot
from everyframe.server.http.resources import MADE_VARIANTS, VARIANTS

router = APIRouter(tags=["videos"])

#: Files of a finished video do not change.
_CACHED = "private, max-age=3600"


@router.get("/v1/videos/{video_id}/content", response_class=FileResponse)
async def download_content(
    video_id: str,
    context: Context,
    caller: Caller,
    variant: str = "video",
    index: Annotated[int, Query(ge=1, le=10_000)] = 1,
) -> Any:
    """The video or one of its variants, also by ranges; `index` selects one of several videos."""
    job = await context.job(video_id, caller)
    if variant not in VARIANTS and variant not in MADE_VARIANTS:
        names = ", ".join([*VARIANTS, *MADE_VARIANTS])
        text = f"variant must be one of {names}, got {variant[:80]!r}"
        raise ApiError("invalid_value", text, "variant")
    if job.status != "completed":
        raise ApiError("not_ready", f"video {video_id} is {job.status}; it has no content yet")
    number = int(job.resolved.get("num_videos", 1))
    if index > number:
        text = f"index must be 1 to {number}, the videos of this job, got {index}"
        raise ApiError("invalid_value", text, "index")
    shown, kind = VARIANTS.get(variant, VARIANTS["video"])
    path = context.folder.video(video_id) / _variant_name(shown, index)
    if not await in_thread(path.is_file):
        raise ApiError("not_found", f"there is no such file of video {video_id}")
    name = f"{video_id}{'' if variant == 'video' else f'-{variant}'}"
    if variant in MADE_VARIANTS:
        return await _make_variant(context, path, variant, name)
    return FileResponse(
        path,
        media_type=kind,
        filename=f"{name}{path.suffix}",
        content_disposition_type="inline",
        headers={"cache-control": _CACHED},
    )


def _variant_name(name: str, index: int) -> str:
    """File name of a job's video number `index`; thumbnail and spritesheet exist for the first."""
    stem, _, ending = name.partition(".")
    return name if index == 1 or stem != "video" else f"{stem}-{index}.{ending}"


async def _make_variant(context: ServerContext, path: Path, variant: str, name: str) -> Response:
    """A variant that is generated from the video's file."""
    kind = MADE_VARIANTS[variant]
    if variant == "preview":
        data = await in_thread(preview_bytes, path)
        return Response(data, media_type=kind, headers={"cache-control": _CACHED})
    archive = await in_thread(frames_archive, path, context.folder.inputs)
    return _OwnFileResponse(archive, media_type=kind, filename=f"{name}.zip")


class _OwnFileResponse(FileResponse):
    """Sends a file that is this response's own, and deletes it however that ends.

    A background task would stay away after an unreadable range, or if the server stops meanwhile.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.unlink(self.path)


@router.get("/v1/videos/{video_id}/events", response_class=StreamingResponse)
async def video_events(
    video_id: str,
    context: Context,
    caller: Caller,
    preview: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int | None, Query(ge=0)] = None,
) -> Any:
    """Events of a job as they happen, until it is done; `Last-Event-ID` continues after a break."""
    job = await context.job(video_id, caller)
    hub = open_hub(context, caller)
    begin = _begin(context, last_event_id, after)
    last = context.store.last_event

    def snapshot() -> list[tuple[str, dict[str, Any]]]:
        now = context.store.get(video_id) or job
        return job_snapshot(context.store, now) if begin is None or now.is_final else []

    stream = hub.stream(
        caller, last if begin is None else begin, video=video_id, snapshot=snapshot,
        with_previews=preview,
    )  # fmt: skip
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)


@router.get("/v1/events", response_class=StreamingResponse)
async def all_events(
    context: Context,
    caller: Caller,
    preview: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int | None, Query(ge=0)] = None,
) -> Any:
    """Events of all jobs of the key as they happen; each names its video."""
    begin = _begin(context, last_event_id, after)

    def snapshot() -> list[tuple[str, dict[str, Any]]]:
        if begin is not None:
            return []
        jobs = context.store.list(
            limit=1000, order="asc", statuses=("queued", "in_progress"), owner=caller.owner
        )
        return [event for job in jobs for event in job_snapshot(context.store, job)]

    stream = open_hub(context, caller).stream(
        caller, context.store.last_event if begin is None else begin, video=None, snapshot=snapshot,
        with_previews=preview,
    )  # fmt: skip
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)


def open_hub(context: ServerContext, caller: Principal) -> EventHub:
    """The hub for a new stream. Raises `ApiError` at the limit of streams, or while draining."""
    hub = context.hub
    assert hub is not None, "the application runs"
    context.check_not_draining()
    limits = context.settings.limits
    most_of_key = limits.event_streams_of_key if context.settings.keys else limits.event_streams
    if hub.num_streams() >= limits.event_streams or hub.num_streams(caller) >= most_of_key:
        raise ApiError(
            "rate_limited", "too many event streams are open; close some",
            headers={"retry-after": "5"},
        )  # fmt: skip
    return hub


def _begin(context: ServerContext, header: str | None, after: int | None) -> int | None:
    """Number of the event after which a stream begins; None: it begins now, with a snapshot.

    A header that is not a number is ignored. So is a number above the newest event's, which a
    client can have from before a power cut or from another data folder.
    """
    if after is None and header and header.isascii() and header.isdigit() and len(header) < 19:
        after = int(header)
    return None if after is None or after > context.store.last_event else after
