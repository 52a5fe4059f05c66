"""Jobs of the server's tests: add one, wait for it, and read its frames."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from everyframe.media.read import read_video
from everyframe.server.data_folder import DataFolder
from everyframe.server.dispatch.dispatcher import Dispatcher
from everyframe.server.queue.jobs import Job, NewJob
from everyframe.server.queue.store import JobStore

Start = Callable[..., Dispatcher]


def add(store: JobStore, seed: int = 3, **values: Any) -> Job:
    request = {"prompt": "a red circle", "seed": seed, "num_frames": 4, "size": "64x64"}
    return store.add(NewJob({**request, **values.pop("request", {})}, **values))


def ended(store: JobStore, job: Job, status: str = "completed", seconds: float = 20) -> Job:
    """The job once it has that status."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        last, now = store.last_event, store.get(job.id)
        assert now is not None
        if now.status == status:
            return now
        assert not now.is_final, (now.status, now.error)
        store.wait(last, 0.2)
    raise AssertionError(f"{now.status} after {seconds} s, not {status}")


def frames_in(folder: DataFolder, job: Job) -> np.ndarray[Any, Any]:
    assert job.file is not None
    return read_video(folder.path / job.file)[0]


def types(store: JobStore, job: Job) -> list[str]:
    return [event.type for event in store.events(video=job.id)]


def synchronous_levels(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The level of `synchronous` of each transaction from now on."""
    levels: list[int] = []
    write = store._database.write

    @contextmanager
    def noted(**values: Any) -> Iterator[sqlite3.Connection]:
        with write(**values) as connection:
            levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])
            yield connection

    monkeypatch.setattr(store._database, "write", noted)
    return levels
