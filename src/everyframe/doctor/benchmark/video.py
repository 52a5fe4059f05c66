"""A video of the embedded model: time to its first frame, and steps a second.

Runs in a process of its own.
"""

from __future__ import annotations

import time
from typing import Any

from everyframe.core.events import Event, FramesDecoded, Planned, Step
from everyframe.core.request import Request

PROMPT = "a red circle moves to the right on a blue background"


def measure_video(device: str, num_threads: int) -> dict[str, Any]:
    """Two videos one after the other, as plain data; see `result.VideoResult`."""
    began = time.perf_counter()
    from everyframe.engine.run import stream
    from everyframe.runs.run_state import SaveOptions

    imported = time.perf_counter() - began
    request = Request(prompt=PROMPT, seed=7, device=device)

    def made() -> tuple[list[tuple[float, Event]], float]:
        start = time.perf_counter()
        events = stream(request, num_threads=num_threads, keep=SaveOptions(None))
        return [(time.perf_counter() - start, each) for each in events], time.perf_counter() - start

    first, seconds = made()
    again, warm_seconds = made()
    plan = next(event.plan for _, event in first if isinstance(event, Planned))
    settings = plan.settings
    steps = [event.seconds for _, event in again if isinstance(event, Step)]
    denoiser = next(component for component in plan.components if component.name == "denoiser")
    return {
        "work": f"shapes, {settings.width}x{settings.height}, {settings.num_frames} frames, "
        f"{settings.num_inference_steps} steps",
        "precision": denoiser.precision.compute,
        "import_seconds": imported,
        "first_frame_seconds": next(at for at, each in first if isinstance(each, FramesDecoded)),
        "seconds": seconds,
        "warm_seconds": warm_seconds,
        "steps_per_second": len(steps) / sum(steps),
    }
