"""A server's application over a new data folder, without network, workers or torch."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from everyframe.core.errors import InputError
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers.executor import InfeasiblePlanError, WarmModel
from everyframe.server.data_folder import open_folder
from everyframe.server.dispatch.dispatcher import Dispatcher, DispatcherOptions
from everyframe.server.http.app import create_app
from everyframe.server.queue.store import JobStore
from everyframe.server.settings import ApiKey, ServerSettings
from helpers.fake_engine import plan_of

ADDRESS = "http://127.0.0.1:8000"


class PlanningExecutor:
    """An executor that only plans; `requests` are those that it planned."""

    has_batches = False

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def plan(self, request: Request) -> Plan:
        self.requests.append(request)
        if request.size == "16384x64":
            raise InfeasiblePlanError(plan_of(request, "this needs 900 GB of memory"))
        if request.num_frames == 7:
            raise InputError("num_frames must be 1 or a multiple of 4, got 7; try 4 or 8")
        return replace(plan_of(request), notes=())

    def run(self, *arguments: Any) -> Any:
        raise AssertionError("nothing runs here")

    def describe(self) -> list[WarmModel]:
        return [WarmModel("shapes", 1000, 1.0, ("cpu",))]

    def close(self) -> None: ...


class ServedApp:
    """An application, its parts, and a client; a context manager. With `runs` its jobs run."""

    def __init__(
        self, folder: Path, executor: Any = None, *, runs: bool = False, **settings: Any
    ) -> None:
        self.folder = open_folder(folder)
        self.store = JobStore(self.folder)
        self.executor = executor = executor or PlanningExecutor()
        self._runs = runs
        self.settings = ServerSettings(**{"models": ("shapes",), **settings})
        self.dispatcher = Dispatcher(self.store, executor, DispatcherOptions(min_free_bytes=0))
        self.app = create_app(self.store, self.dispatcher, executor, self.settings)
        self.context = self.app.state.context
        self.client = TestClient(self.app, base_url=ADDRESS, raise_server_exceptions=False)

    def __enter__(self) -> ServedApp:
        self.client.__enter__()
        if self._runs:
            self.dispatcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.client.__exit__(*error)
        self.dispatcher.drain()
        self.store.close()
        self.folder.close()

    def finish(self, video: str, own: dict[str, bytes] | None = None) -> dict[str, bytes]:
        """Complete a job with small files, or its `own`; their content by name."""
        place = self.folder.new_video(video)
        files = {
            "video.mp4": b"\0\0\0\x18ftypmp42" + bytes(range(200)),
            "thumbnail.webp": b"RIFFthumbnailWEBP",
            "spritesheet.webp": b"RIFFspritesheetWEBP",
            "video.json": b"{}\n",
            **(own or {}),
        }
        for name, data in files.items():
            (place / name).write_bytes(data)
        fields = {"file": f"videos/{video}/video.mp4"}
        self.folder.publish(video, fields)
        self.store.claim("default")
        self.store.finish(video, "completed", **fields)
        return files


@contextmanager
def listening(app: ServedApp) -> Iterator[str]:
    """Context: an application behind a real socket; its address."""
    place = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app.app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{place.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def key(name: str, text: str, role: Any = "user") -> ApiKey:
    """A key of the server's settings."""
    return ApiKey(name, hashlib.sha256(text.encode()).hexdigest(), role)


def png(width: int = 8, height: int = 8) -> bytes:
    """A small picture."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def mp4(seconds: int, side: int = 16) -> bytes:
    """A video of four frames a second, each in a grey of its own."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=4)
        stream.width = stream.height = side
        for number in range(4 * seconds):
            grey = np.full((side, side, 3), 20 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
