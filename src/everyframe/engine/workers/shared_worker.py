"""A worker process that has several jobs of one batch at a time, each with a connection of its own.

The process sends the messages of all jobs through one connection (`worker.py`). A thread here hands
each message on to the connection of its job, so that the consumer of a job need not know of the
others. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection, Pipe
from typing import Any

from everyframe.engine.workers.worker_process import Worker, WorkerJob, receive, receive_raw, send

_log = logging.getLogger(__name__)

_TAGS = count(1)


class SharedWorker:
    """The jobs of a batch that a worker has now.

    Attributes:
        is_fit: whether the worker can have further jobs.
    """

    def __init__(self, worker: Worker, batch: str) -> None:
        self.worker, self.batch = worker, batch
        self.is_fit = True
        self._lock = threading.Lock()
        self._jobs: dict[int, BatchedWorker] = {}
        self._reader: threading.Thread | None = None

    def give(self, job: WorkerJob) -> BatchedWorker:
        """Give it one more job.

        Raises:
            OSError: the worker is gone.
        """
        job = replace(job, tag=next(_TAGS))
        mine = BatchedWorker(self, job)
        with self._lock:
            self._jobs[mine.tag] = mine
            self.worker.job, self.worker.waits, self.worker.has_ended = job, False, False
            if self._reader is None:
                self._reader = threading.Thread(
                    target=self._hand_on, name="messages of a batch", daemon=True
                )
                self._reader.start()
        try:
            send(self.worker.connection, "job", job)
        except OSError:
            self.forget(mine)
            mine.close()
            raise
        return mine

    @property
    def is_at_work(self) -> bool:
        """Whether a job has not ended, also one whose consumer did not wait for that."""
        with self._lock:
            return bool(self._jobs)

    def forget(self, mine: BatchedWorker) -> None:
        """Wait for no message of a job."""
        with self._lock:
            self._jobs.pop(mine.tag, None)

    def note_end(self, mine: BatchedWorker, value: Mapping[str, Any]) -> None:
        """Note that a job has ended, with what the worker says of itself."""
        with self._lock:
            self._jobs.pop(mine.tag, None)
            self.is_fit = self.is_fit and bool(value.get("waits"))
            self.worker.warm = value.get("warm", ())
            self.worker.waits = self.worker.has_ended = self.is_fit and not self._jobs

    def is_read_to_its_end(self, seconds: float) -> bool:
        """Whether the thread has stopped reading the connection of a dead worker, within `seconds`.

        Before, it must not be closed: its number would be that of another connection.
        """
        reader = self._reader
        if reader is not None:
            reader.join(seconds)
        return reader is None or not reader.is_alive()

    def _hand_on(self) -> None:
        """Hand messages on until no job is left, or the worker is gone."""
        try:
            while True:
                name, tag, message = receive_raw(self.worker.connection)
                with self._lock:
                    read = [each for each in self._jobs.values() if not each.is_closed]
                    jobs = read[:1] if tag is None else [self._jobs.get(tag)]
                for each in jobs:  # a log record is of all, and is to be read once
                    if each is not None:
                        each.take(name, message)
                with self._lock:
                    if not self._jobs:
                        self._reader = None
                        return
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for ever
            self.is_fit = False
            if not isinstance(error, EOFError):
                _log.error("messages of a worker can't be read, it is ended", exc_info=True)
                self.worker.end_now()
            with self._lock:
                lost, self._reader = [*self._jobs.values()], None
            for mine in lost:
                mine.lose()


class BatchedWorker(Worker):
    """Handle of a worker for one job of a batch.

    Attributes:
        is_closed: whether nobody reads its messages.
    """

    def __init__(self, shared: SharedWorker, job: WorkerJob) -> None:  # it starts no process
        self.job, self.tag = job, job.tag or 0
        self.has_ended, self.waits, self.is_closed = False, False, False
        self.warm = ()
        self._shared = shared
        self._process = shared.worker._process
        reader, self._writer = Pipe(duplex=False)
        assert isinstance(reader, Connection)
        self.connection = reader
        self._writing = threading.Lock()
        self._ending = threading.Event()

    def take(self, name: str, message: list[bytes]) -> None:
        """Take a message of the worker; called by the thread that reads them."""
        if name in ("end", "error"):
            _, value = receive(_Bytes(message))
            self._shared.note_end(self, value)
            self._ending.set()
        with self._writing:
            try:
                for part in message:
                    self._writer.send_bytes(part)
            except OSError:
                _log.debug("nobody reads the messages of job %d", self.tag)

    def lose(self) -> None:
        """Close the connection: the worker is gone."""
        self._shared.forget(self)
        self._ending.set()
        self._close_writer()

    def stop(self, seconds: float) -> bool:
        """Stop the job at its next step; whether it has ended within `seconds`."""
        if self._ending.is_set():
            return self._shared.is_fit
        self.connection.close()
        until = time.monotonic() + seconds
        try:
            send(self._shared.worker.connection, "stop", self.tag)
        except OSError:
            return False
        return self._ending.wait(max(0.0, until - time.monotonic())) and self._shared.is_fit

    def close(self) -> None:
        """Close its connection, not the worker, which may still end the job."""
        self.is_closed = True
        self.connection.close()
        self._close_writer()

    def _close_writer(self) -> None:
        # Not closed while the writing thread uses it; that ends at once, as nobody reads.
        with self._writing:
            self._writer.close()


class _Bytes:
    """A message in memory, to be read as from a connection."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = iter(parts)

    def recv_bytes(self) -> bytes:
        return next(self._parts)

    def send_bytes(self, buf: Any, /) -> None:
        raise AssertionError("a message that was received")
