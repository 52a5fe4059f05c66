"""Run a job in a thread: progress and previews for ComfyUI, and its interrupt.

A job may wait long for its next event, so that the node's thread polls the interrupt beside it.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import comfy.model_management
import comfy.utils
from PIL import Image

#: Seconds between two looks at ComfyUI's interrupt.
POLL_SECONDS = 0.2
#: Longer side of a preview in pixels.
_PREVIEW_SIDE = 512


@dataclass(frozen=True)
class Progress:
    """How far a job is: percent over all of its stages, and a preview as a JPEG file, if any."""

    percent: int
    preview: bytes | None = None


ReportProgress = Callable[[Progress], None]


class Job(Protocol):
    """A job of a worker process or of a server."""

    def run(self, tell: ReportProgress) -> Any:
        """Run to the end, in a thread of its own; the result."""
        ...

    def stop(self) -> None:
        """Stop it from another thread; it returns at once. A finished job is left alone."""
        ...


def run_job(job: Job) -> Any:
    """Run a job and show its progress; the result.

    Raises ComfyUI's exception within `POLL_SECONDS` of an interrupt, and any error of the job.
    """
    messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            messages.put(("result", job.run(lambda progress: messages.put(("progress", progress)))))
        except BaseException as error:  # noqa: BLE001 - the node's thread raises it
            messages.put(("error", error))

    bar = comfy.utils.ProgressBar(100)
    threading.Thread(target=work, name="everyframe", daemon=True).start()
    try:
        while True:
            comfy.model_management.throw_exception_if_processing_interrupted()
            try:
                kind, value = messages.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if kind == "error":
                raise value
            if kind == "result":
                bar.update_absolute(100, 100)
                return value
            bar.update_absolute(value.percent, 100, _preview(value.preview))
    finally:
        job.stop()


def _preview(data: bytes | None) -> tuple[str, Image.Image, int] | None:
    """A preview as ComfyUI's progress bar takes it."""
    if data is None:
        return None
    return "JPEG", Image.open(io.BytesIO(data)), _PREVIEW_SIDE
