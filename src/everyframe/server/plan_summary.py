"""What the server says of a plan: the settings of the video, and the plan in short."""

from __future__ import annotations

from typing import Any

from everyframe.core.plan import Plan


def resolved_values(plan: Plan) -> dict[str, Any]:
    """What a plan says of the video, for a job's row and the API."""
    settings = plan.settings
    num_frames = settings.num_frames * settings.chain
    return {
        "width": settings.width,
        "height": settings.height,
        "num_frames": num_frames,
        "fps": settings.fps,
        "seconds": num_frames / settings.fps,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "num_videos": settings.num_videos,
    }


def plan_summary(plan: Plan) -> dict[str, Any]:
    """A plan in short: what a person wants to know before the run."""
    return {
        "model": plan.model,
        "family": plan.family,
        "title": plan.title,
        "device": plan.device.name,
        "dtypes": {part.name: str(part.precision) for part in plan.components},
        "peak_memory_mb": round(plan.peak_bytes / 1e6),
        "host_memory_mb": round(plan.host_bytes / 1e6),
        "seconds_forecast": plan.seconds,
        "stages": {stage.name: stage.seconds for stage in plan.stages},
        "downloads": list(plan.downloads),
        "notes": list(plan.notes),
        **resolved_values(plan),
    }
