"""Jobs of an Everyframe server: created, followed by their events, fetched."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from .media import GeneratedVideo, load_generated, new_file
from .run_loop import Progress, ReportProgress
from .server_client import Connection, ServerClient, ServerError, UnreachableError

_LOG = logging.getLogger(__name__)
#: Seconds that a server may be away before a job is given up, and between two tries.
_PATIENCE, _PAUSE = 60.0, 1.0
_CANCEL_SECONDS = 5.0


class ServerRun:
    """A video made by a server.

    Attributes:
        options: fields of ``POST /v1/videos``.
    """

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._client = ServerClient(connection)
        self._options = dict(options)
        self._id: str | None = None
        self._is_stopped = self._is_done = False
        self._lock = threading.Lock()

    def run(self, tell: ReportProgress) -> GeneratedVideo:
        """Make and fetch the video; see `run_loop.Job`."""
        created = self._client.ask("/v1/videos", self._options)
        with self._lock:
            self._id = str(created["id"])
            is_stopped = self._is_stopped
        if is_stopped:  # before its id was known
            self._cancel()
        done = self._follow(tell)
        self._is_done = True
        if done["status"] != "completed":
            raise ServerError(self._why(done))
        file, own = new_file(), f"/v1/videos/{self._id}/content"
        self._client.download(own, file)
        record = new_file("json")
        self._client.download(f"{own}?variant=metadata", record)
        text = record.read_text(encoding="utf-8")
        record.unlink()
        return load_generated(file, text)

    def stop(self) -> None:
        """Cancel the job on the server; see `run_loop.Job`."""
        with self._lock:
            if self._is_stopped or self._is_done:
                return
            self._is_stopped = True
            is_created = self._id is not None
        if is_created:
            threading.Thread(target=self._cancel, daemon=True).start()

    def _cancel(self) -> None:
        try:
            self._client.ask(f"/v1/videos/{self._id}/cancel", {}, _CANCEL_SECONDS)
        except ServerError as error:
            _LOG.warning("Everyframe job %s was not cancelled: %s", self._id, error)

    def _follow(self, tell: ReportProgress) -> dict[str, Any]:
        """The job once it has ended; its events resume after a break."""
        after: str | None = None
        percent, until = 0, time.monotonic() + _PATIENCE
        while True:
            path = f"/v1/videos/{self._id}/events?preview=true"
            try:
                for kind, number, data in self._client.events(path, after):
                    after, until = number or after, time.monotonic() + _PATIENCE
                    if kind == "done":
                        return dict(data)
                    if kind == "deleted":
                        raise ServerError(f"the job {self._id} was deleted on the server")
                    if kind == "progress":
                        percent = int(data["progress"])
                        tell(Progress(percent))
                    elif kind == "preview":
                        picture = data["image"].partition(",")[2]
                        tell(Progress(percent, base64.b64decode(picture)))
            except UnreachableError as error:
                if time.monotonic() > until:
                    raise UnreachableError(
                        f"{error}; the job {self._id} goes on when the server does, and its video "
                        f"is at /v1/videos/{self._id}/content"
                    ) from error
            if time.monotonic() > until:
                raise UnreachableError(
                    f"the server ends its events of job {self._id} early; look at its page"
                )
            time.sleep(_PAUSE)

    def _why(self, done: Mapping[str, Any]) -> str:
        if done["status"] == "cancelled":
            return f"the job {self._id} was cancelled on the server; queue it again"
        error = done.get("error") or {}
        return str(error.get("message") or f"the job {self._id} is {done['status']}")


class ServerPlan:
    """A plan that a server makes, as text."""

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._client = ServerClient(connection)
        self._options = dict(options)

    def run(self, tell: ReportProgress) -> str:
        """Plan; see `run_loop.Job`."""
        return plan_text(self._client.ask("/v1/plan", self._options))

    def stop(self) -> None:
        """Leave it: the answer is not waited for."""


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan of a server as lines of text."""
    shown = {
        "device": plan["device"],
        "video": f"{plan['width']}x{plan['height']}, {plan['num_frames']} frames at "
        f"{plan['fps']:g} fps",
        "steps": plan["num_inference_steps"],
        "precision": ", ".join(f"{name} {dtype}" for name, dtype in plan["dtypes"].items()),
        "device memory": f"{plan['peak_memory_mb']} MB",
        "host memory": f"{plan['host_memory_mb']} MB",
    }
    if plan["seconds_forecast"] is not None:
        shown["time"] = f"about {plan['seconds_forecast']:.0f} seconds"
    if plan["downloads"]:
        shown["downloads"] = ", ".join(map(str, plan["downloads"]))
    lines = [f"{plan['model']}: {plan['title']}", *(f"{k}: {v}" for k, v in shown.items())]
    return "\n".join([*lines, *(f"note: {note}" for note in [*plan["notes"], *plan["warnings"]])])
