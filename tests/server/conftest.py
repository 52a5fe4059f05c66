"""A data folder, a queue, and dispatchers that are drained at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everyframe.engine.workers.executor import Executor
from everyframe.server.data_folder import DataFolder, open_folder
from everyframe.server.dispatch.dispatcher import Dispatcher, DispatcherOptions
from everyframe.server.queue.store import JobStore


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = open_folder(tmp_path / "server")
    yield folder
    folder.close()


@pytest.fixture
def store(folder: DataFolder) -> Iterator[JobStore]:
    store = JobStore(folder)
    yield store
    store.close()


@pytest.fixture
def dispatch(store: JobStore) -> Iterator[Callable[..., Dispatcher]]:
    """Start a dispatcher over an executor, with these options."""
    begun: list[Dispatcher] = []

    def start(executor: Executor, **options: Any) -> Dispatcher:
        options = {"min_free_bytes": 0, **options}
        dispatcher = Dispatcher(store, executor, DispatcherOptions(**options))
        begun.append(dispatcher)
        dispatcher.start()
        return dispatcher

    yield start
    for each in begun:
        each.drain()
