"""Resources of the API: OpenAI's video with our fields, its list, and its deletion.

The classes are the schema of ``openapi.json``; `video_resource` fills one from a job.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Literal

from pydantic import BaseModel

from everyframe.server.data_folder import MEDIA, is_input
from everyframe.server.queue.jobs import Job

#: Variants of a video's content -> file in its folder and media type.
VARIANTS = {
    "video": ("video.mp4", "video/mp4"),
    "thumbnail": ("thumbnail.webp", "image/webp"),
    "spritesheet": ("spritesheet.webp", "image/webp"),
    "metadata": ("video.json", "application/json"),
}
#: Variants that are made when they are asked for -> media type.
MADE_VARIANTS = {"preview": "image/webp", "frames": "application/zip"}
#: Milliseconds that the smallest job takes at least; sets how soon a queued job is asked for again.
_LEAST_MS = 50


class VideoError(BaseModel):
    """Why a job failed."""

    code: str
    message: str


class VideoQuality(BaseModel):
    """What the plan does for the quality that was asked for.

    `worst_db` is the smallest PSNR of a frame against the exact video over `num_videos` calibrated
    videos, `gain` the denoising time saved; both are null where nothing was measured.
    """

    asked: str
    method: str
    why: str
    worst_db: float | None
    median_db: float | None
    num_videos: int
    gain: float | None


class VideoResource(BaseModel):
    """A job and its video. The first 13 fields are OpenAI's.

    Times are seconds since the epoch. `seconds` is the true duration. `progress` is percent over
    all stages; it never falls and is under 100 until the video is there.
    """

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str | None
    size: str
    seconds: str
    remixed_from_video_id: str | None
    error: VideoError | None

    seed: int
    num_frames: int | None
    fps: float | None
    num_inference_steps: int | None
    num_videos: int
    quality: VideoQuality | None
    phase: str | None
    step: int | None
    total_steps: int | None
    eta_s: float | None
    queue_position: int | None
    inference_time_s: float | None
    stage_durations: dict[str, float]
    peak_memory_mb: float | None
    warnings: list[str]
    repairs: list[Any]
    checks: dict[str, Any]
    resumed_from_step: int | None
    links: dict[str, str]
    request: dict[str, Any]


class VideoList(BaseModel):
    """A page of videos."""

    object: Literal["list"] = "list"
    data: list[VideoResource]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    """A video that was deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


def video_resource(job: Job, queue_position: int | None = None) -> dict[str, Any]:
    """A job as the API shows it, as JSON data; as a failed one if its row was changed by hand."""
    try:
        return _resource(job, queue_position)
    except (ValueError, TypeError, KeyError) as error:  # pydantic's are among them
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return _resource(job.as_damaged(why), None)


def _resource(job: Job, queue_position: int | None) -> dict[str, Any]:
    resolved, report = job.resolved, job.report
    width, height = resolved.get("width"), resolved.get("height")
    found = VideoResource(
        id=job.id,
        model=job.model,
        status=job.status,
        progress=job.progress,
        created_at=int(job.created_at),
        completed_at=_whole(job.completed_at),
        expires_at=_whole(job.expires_at),
        prompt=job.request.get("prompt"),
        size=f"{width}x{height}" if width and height else "",
        seconds=seconds_text(resolved.get("seconds")),
        remixed_from_video_id=job.parent,
        error=_error(job),
        seed=job.request["seed"],
        num_frames=resolved.get("num_frames"),
        fps=resolved.get("fps"),
        num_inference_steps=resolved.get("num_inference_steps"),
        num_videos=resolved.get("num_videos", 1),
        quality=resolved.get("quality"),
        phase=job.phase,
        step=job.step,
        total_steps=job.total_steps,
        eta_s=job.eta_s,
        queue_position=queue_position,
        inference_time_s=report.get("inference_time_s"),
        stage_durations=report.get("stage_durations", {}),
        peak_memory_mb=report.get("peak_memory_mb"),
        warnings=report.get("warnings", []),
        repairs=report.get("repairs", []),
        checks=report.get("checks", {}),
        resumed_from_step=report.get("resumed_from_step"),
        links=_links(job),
        request=request_options(job),
    )
    return found.model_dump()


def request_options(job: Job) -> dict[str, Any]:
    """Options of a job as a client sent them: no paths, and ``true`` for a picture or video."""
    shown = {name: value for name, value in job.request.items() if name != "model"}
    for name in MEDIA:
        if is_input(shown.get(name)):
            shown[name] = True
    if "loras" in shown:
        shown["loras"] = [_lora_text(each) for each in shown["loras"]]
    return shown


def _lora_text(lora: dict[str, Any]) -> str:
    at = f"@{lora['component']}" if lora["component"] else ""
    return f"{PurePath(lora['file']).stem}:{lora['strength']:g}{at}"


def seconds_text(seconds: float | None) -> str:
    """A duration as a decimal text such as ``"4"`` or ``"2.125"``."""
    return f"{seconds or 0:.3f}".rstrip("0").rstrip(".")


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _error(job: Job) -> VideoError | None:
    if job.error is None:
        return None
    return VideoError(code=str(job.error["code"]), message=str(job.error["message"]))


def _links(job: Job) -> dict[str, str]:
    own = f"/v1/videos/{job.id}"
    links = {"self": own, "events": f"{own}/events"}
    if job.status == "completed":
        links |= {"content": f"{own}/content"}
        variants = [*VARIANTS, *MADE_VARIANTS]
        links |= {name: f"{own}/content?variant={name}" for name in variants if name != "video"}
    elif job.status in ("failed", "cancelled"):
        links |= {"retry": f"{own}/retry"}
    else:
        links |= {"cancel": f"{own}/cancel"}
    return links


def poll_after_ms(job: Job, queue_position: int | None, now: float) -> int:
    """Milliseconds until a client should poll again: short at first, then a tenth of the rest.

    A queued job waits for the jobs before it, each of which takes at least `_LEAST_MS`.
    """
    least = max(250, _LEAST_MS * (queue_position or 0))
    if now - job.created_at < 10 or job.eta_s is None:
        return min(least if now - job.created_at < 10 else max(least, 1000), 5000)
    return int(min(max(job.eta_s * 100, least), 5000))
