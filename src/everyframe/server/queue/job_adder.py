"""Add jobs to the queue from the event loop; jobs that arrive together share one commit.

Flushing to disk costs as much for one job as for many, and a switch between threads costs more than
the work on a row.
"""

from __future__ import annotations

import asyncio

import anyio
import anyio.to_thread

from everyframe.server.queue.jobs import Job, NewJob
from everyframe.server.queue.store import JobStore

#: Jobs of one commit.
_MOST = 64


class JobAdder:
    """Adds jobs in order of arrival; `add` runs in the server's event loop."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._waiting: list[tuple[NewJob, asyncio.Future[tuple[Job, int | None]]]] = []
        self._writing: asyncio.Task[None] | None = None
        # A thread of its own, so that no job waits behind uploads that are stored.
        self._limiter = anyio.CapacityLimiter(1)

    async def add(self, job: NewJob) -> tuple[Job, int | None]:
        """Add a job; returns it once it is on disk, and its `JobStore.queue_position`.

        Raises the errors of `JobStore.add`. A job stays in the queue if its caller is cancelled.
        """
        answer: asyncio.Future[tuple[Job, int | None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, answer))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await answer

    async def _write(self) -> None:
        """Write all waiting jobs; while one group is written, the next one gathers."""
        try:
            while self._waiting:
                await self._gather()
                group, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._write_group(group)
        finally:
            self._writing = None

    async def _gather(self) -> None:
        """Wait as long as each turn of the event loop brings another job."""
        number = 0
        while number < len(self._waiting) < _MOST:
            number = len(self._waiting)
            await asyncio.sleep(0)

    async def _write_group(
        self, group: list[tuple[NewJob, asyncio.Future[tuple[Job, int | None]]]]
    ) -> None:
        def write() -> list[tuple[Job, int | None] | Exception]:
            added = self._store.add_all([job for job, _ in group])
            return [
                each if isinstance(each, Exception) else (each, self._store.queue_position(each))
                for each in added
            ]

        try:
            found = await anyio.to_thread.run_sync(write, limiter=self._limiter)
        except Exception as error:  # noqa: BLE001 - raised again by each `add`
            found = [error] * len(group)
        for (_, answer), result in zip(group, found, strict=True):
            if answer.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
