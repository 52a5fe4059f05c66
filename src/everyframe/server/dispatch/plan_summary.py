"""Summaries of a plan for clients: the settings of the video, and the plan in short."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from everyframe.core.plan import Plan


def resolved_of(plan: Plan) -> dict[str, Any]:
    """Settings of the video as JSON data: size in pixels, frames, fps, steps, guidance, seed.

    Also the lossy method chosen for a quality budget, with its measurements; None if exact.
    """
    settings = plan.settings
    num_frames = settings.num_frames * settings.chain
    return {
        "model": plan.model,
        "size": f"{settings.width}x{settings.height}",
        "width": settings.width,
        "height": settings.height,
        "num_frames": num_frames,
        "fps": settings.fps,
        "seconds": num_frames / settings.fps,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "seed": settings.seed,
        "num_videos": settings.num_videos,
        "quality": None if plan.quality is None else asdict(plan.quality),
    }


def plan_data(plan: Plan) -> dict[str, Any]:
    """Family, precision, fast paths, memory, time and notes of a plan.

    ``/v1/plan`` and the ``planned`` event send them beside `resolved_of`.
    """
    return {
        **resolved_of(plan),
        "family": plan.family,
        "title": plan.title,
        "device": plan.device.name,
        "dtypes": {part.name: str(part.precision) for part in plan.components},
        "fast_paths": {part.name: list(part.fast_paths or ()) for part in plan.components},
        "peak_memory_mb": round(plan.peak_bytes / 1e6),
        "host_memory_mb": round(plan.host_bytes / 1e6),
        "seconds_forecast": plan.seconds,
        "stages": {stage.name: stage.seconds for stage in plan.stages},
        "batch": None if plan.batch is None else asdict(plan.batch),
        "downloads": list(plan.downloads),
        "notes": list(plan.notes),
    }
