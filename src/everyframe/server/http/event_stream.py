"""Server-sent events of jobs: sent as the store gets them, resumed by ``Last-Event-ID``."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread

from everyframe.core.events import Event, Preview
from everyframe.server.dispatch.dispatcher import Dispatcher
from everyframe.server.http.access import Principal
from everyframe.server.http.resources import video_resource
from everyframe.server.queue.jobs import Job, StoredEvent
from everyframe.server.queue.store import JobStore

#: Seconds after which an idle stream sends a comment, so that no proxy closes it.
PING_SECONDS = 15.0
#: Events that are read at once.
_CHUNK = 200

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
MEDIA_TYPE = "text/event-stream"


class EventHub:
    """Wakes the open streams when the store has a new event. Belongs to one event loop."""

    def __init__(self, store: JobStore, dispatcher: Dispatcher) -> None:
        self._store, self._dispatcher = store, dispatcher
        self._streams: dict[asyncio.Event, Principal] = {}
        self._loop = asyncio.get_running_loop()
        self._previews: dict[asyncio.Event, dict[str, Preview]] = {}
        self.is_draining = False
        self._stops = [
            store.listen(lambda event: self._wake_soon()),
            dispatcher.listen_previews(self._add_preview),
        ]

    def num_streams(self, caller: Principal | None = None) -> int:
        """Open streams, or those of one principal."""
        return sum(caller in (None, each) for each in self._streams.values())

    def close(self) -> None:
        """End all streams with a ``draining`` event. May be called from any thread."""
        self.is_draining = True
        while self._stops:
            self._stops.pop()()
        self._wake_soon()

    def _add_preview(self, video: str, event: Event) -> None:
        """Pass a preview to the streams that want them; a newer one of the job replaces it."""
        assert isinstance(event, Preview)

        def add() -> None:
            for stream, waiting in self._previews.items():
                waiting[video] = event
                stream.set()

        self._call(add)

    async def stream(
        self,
        caller: Principal,
        after: int,
        *,
        video: str | None,
        snapshot: Callable[[], list[tuple[str, dict[str, Any]]]],
        with_previews: bool = False,
    ) -> AsyncIterator[bytes]:
        """The text of a stream: `snapshot` first, then the events after that number.

        A job's stream ends with its ``done``, every stream with ``draining``.
        """
        woken = asyncio.Event()
        self._streams[woken] = caller
        previews: dict[str, Preview] = {}
        if with_previews:
            self._previews[woken] = previews
            last = self._dispatcher.preview(video) if video is not None else None
            if video is not None and isinstance(last, Preview):
                previews[video] = last
        try:
            yield b"retry: 1000\n\n"
            for kind, data in await anyio.to_thread.run_sync(snapshot):
                yield event_text(kind, data, after)
                if video is not None and kind == "done":
                    return
            while not self.is_draining:
                woken.clear()
                read = await anyio.to_thread.run_sync(self._read, after, video, caller.owner)
                for event, data in read:
                    after = event.number
                    yield event_text(event.type, data, after)
                    if video is not None and event.type in ("done", "deleted"):
                        return
                while previews:
                    of, preview = previews.popitem()
                    if video in (None, of) and await self._is_of(of, caller.owner):
                        yield event_text("preview", preview_data(of, preview))
                if len(read) == _CHUNK:
                    continue
                try:
                    await asyncio.wait_for(woken.wait(), PING_SECONDS)
                except (TimeoutError, asyncio.TimeoutError):
                    yield b": ping\n\n"
            yield event_text("draining", {})
        finally:
            self._streams.pop(woken, None)
            self._previews.pop(woken, None)

    async def _is_of(self, video: str, owner: str | None) -> bool:
        return await anyio.to_thread.run_sync(self._store.get, video, owner) is not None

    def _read(
        self, after: int, video: str | None, owner: str | None
    ) -> list[tuple[StoredEvent, dict[str, Any]]]:
        events = self._store.events(after=after, video=video, owner=owner, limit=_CHUNK)
        return [(event, self._data(event)) for event in events]

    def _data(self, event: StoredEvent) -> dict[str, Any]:
        data = {"video": event.video, **event.data}
        if event.type in ("status", "done"):
            job = self._store.get(event.video)
            if job is not None and event.type == "done" and job.is_final:
                return {**data, **video_resource(job)}
            if job is not None and event.data.get("status") == "queued":
                data["queue_position"] = self._store.queue_position(job)
        return data

    def _wake_soon(self) -> None:
        if self._streams:  # one that opens now reads what is stored before it waits
            self._call(self._wake)

    def _wake(self) -> None:
        for stream in self._streams:
            stream.set()

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)


def preview_data(video: str, preview: Preview) -> dict[str, Any]:
    """A preview as the stream sends it, with its picture as a data URL."""
    picture = base64.b64encode(preview.image).decode()
    return {
        "video": video, "step": preview.step, "total_steps": preview.num_steps,
        "width": preview.width, "height": preview.height,
        "image": f"data:image/jpeg;base64,{picture}",
    }  # fmt: skip


def job_snapshot(store: JobStore, job: Job) -> list[tuple[str, dict[str, Any]]]:
    """Events that describe a job's current state."""
    if job.is_final:
        return [("done", {"video": job.id, **video_resource(job)})]
    position = store.queue_position(job)
    progress = {
        "video": job.id, "progress": job.progress, "phase": job.phase, "step": job.step,
        "total_steps": job.total_steps, "eta_s": job.eta_s,
    }  # fmt: skip
    status = {"video": job.id, "status": job.status, "queue_position": position}
    return [("status", status), ("progress", progress)]


def event_text(kind: str, data: dict[str, Any], number: int | None = None) -> bytes:
    """One event in the format of ``text/event-stream``."""
    own = f"id: {number}\n" if number is not None else ""
    return f"{own}event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
