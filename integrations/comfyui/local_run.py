"""Jobs in a worker process of this machine, which outlives a job and holds the model in memory.

Everyframe's executor starts it: ComfyUI's process loads no model of ours, and a crash is an error.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_management
import torch

from .media import GeneratedVideo, new_file
from .run_loop import Progress, ReportProgress

_INSTALL = (
    "Everyframe is not installed in ComfyUI's Python: python -m pip install everyframe, or "
    "connect an Everyframe Server node"
)


class _SharedWorkers:
    """The worker processes of this ComfyUI: one job at a time, whatever node asks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._executor: Any = None

    def get(self) -> Any:
        """The executor, a new one if there is none."""
        from everyframe.engine.workers.warm_workers import WarmWorkers

        if self._executor is None:
            self._executor = WarmWorkers()
        return self._executor

    def close(self) -> None:
        """End the worker processes, and free their memory."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None


WORKERS = _SharedWorkers()


def check_installed() -> None:
    """Raise `RuntimeError` if worker processes can't be had, with what to do."""
    try:
        from everyframe.engine.workers.worker_start import is_possible
    except ImportError as error:
        raise RuntimeError(f"{_INSTALL} ({error})") from error
    if not is_possible():
        raise RuntimeError(
            "worker processes need Linux or macOS, and EVERYFRAME_IN_PROCESS unset; connect an "
            "Everyframe Server node, whose server may run in WSL"
        )


class LocalRun:
    """A video made in a worker process.

    Attributes:
        options: the options of `everyframe.generate`.
        stays_loaded: whether the model stays in memory for the next job.
    """

    def __init__(self, options: Mapping[str, Any], *, stays_loaded: bool) -> None:
        check_installed()
        from everyframe.engine.generate_call import GenerateCall
        from everyframe.engine.workers.stop_switch import StopSwitch

        # Here, so that a wrong option is refused before models are unloaded.
        self._call = GenerateCall.of(None, "float", None, None, {**options, "preview": True})
        self._stays_loaded = stays_loaded
        self._stop = StopSwitch()
        self._run_path: Path | None = None

    def run(self, tell: ReportProgress) -> GeneratedVideo:
        """Make the video; see `run_loop.Job`."""
        from everyframe.core.errors import RunStoppedError
        from everyframe.runs.folder import RunFolder

        with WORKERS.lock:  # a job that was interrupted ends first
            self._stop.check()
            try:
                return _as_made(self._collect(tell))
            except RunStoppedError:
                if self._run_path is not None:
                    RunFolder(self._run_path).remove()
                raise
            finally:
                if not self._stays_loaded:
                    WORKERS.close()

    def stop(self) -> None:
        """Stop at the next step; a worker that does not is killed. See `run_loop.Job`."""
        self._stop.set()

    def _collect(self, tell: ReportProgress) -> Any:
        from everyframe.core.events import Planned, Preview, RunSaved
        from everyframe.engine.results import EventDelivery, collect_videos
        from everyframe.server.dispatch.progress import ProgressMeter

        meter: ProgressMeter | None = None

        def take(event: Any) -> None:
            nonlocal meter
            if isinstance(event, Planned):
                meter = ProgressMeter(event.plan)
            elif isinstance(event, RunSaved):
                self._run_path = Path(event.path)
            if meter is not None:
                meter.take(event)
                tell(Progress(meter.percent, event.image if isinstance(event, Preview) else None))

        events = WORKERS.get().run(self._call.job, stop=self._stop)
        return collect_videos(events, "float", EventDelivery(take))[0]


class LocalPlan:
    """A plan made in a worker process, as text."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_installed()
        from everyframe.core.request import Request

        self._request = Request(**options)

    def run(self, tell: ReportProgress) -> str:
        """Plan; see `run_loop.Job`. Raises `CannotRunError` if this machine can't run it."""
        from everyframe.cli.tables import print_plan

        with WORKERS.lock:
            plan = WORKERS.get().plan(self._request)
        text = io.StringIO()
        print_plan(plan, text)
        return text.getvalue()

    def stop(self) -> None:
        """Leave it: a plan takes seconds."""


def free_memory() -> None:
    """Unload ComfyUI's own models, which the worker's would have to share the device with."""
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def _as_made(video: Any) -> GeneratedVideo:
    file = new_file()
    video.save(file, sidecar=False)
    audio = None
    if video.audio is not None:
        waveform = torch.from_numpy(video.audio.samples)[None]
        audio = {"waveform": waveform, "sample_rate": video.audio.rate}
    frames = torch.from_numpy(video.frames)
    return GeneratedVideo(frames, audio, float(video.fps), file, json.dumps(video.record))
