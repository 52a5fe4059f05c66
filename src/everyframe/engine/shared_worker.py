"""A worker process that has several jobs of one batch at a time, each with a connection of its own.

The process sends the messages of all jobs through one connection (`worker.py`). A thread here hands
each message on to the connection of its job, so that whoever runs a job need not know of the
others. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection, Pipe
from typing import Any

from everyframe.engine.worker_process import Worker, WorkerJob, receive, receive_raw, send

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
        self._is_read = False

    @property
    def num_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

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
            if not self._is_read:
                self._is_read = True
                threading.Thread(
                    target=self._hand_on, name="messages of a batch", daemon=True
                ).start()
        send(self.worker.connection, "job", job)
        return mine

    def forget(self, mine: BatchedWorker) -> None:
        """Hand on no further message of a job."""
        with self._lock:
            self._jobs.pop(mine.tag, None)

    def _hand_on(self) -> None:
        """Hand messages on until no job is left, or the worker is gone."""
        try:
            while True:
                name, tag, message = receive_raw(self.worker.connection)
                with self._lock:
                    jobs = [*self._jobs.values()] if tag is None else [self._jobs.get(tag)]
                for each in jobs[:1]:  # a log record is of all, and is to be read once
                    if each is not None:
                        each.take(name, message)
                with self._lock:
                    if not self._jobs:
                        self._is_read = False
                        return
        except (EOFError, OSError):
            self.is_fit = False
            with self._lock:
                jobs, self._is_read = [*self._jobs.values()], False
            for each in jobs:
                if each is not None:
                    each.lose()


class BatchedWorker(Worker):
    """Handle of a worker for one job of a batch."""

    def __init__(self, shared: SharedWorker, job: WorkerJob) -> None:  # it starts no process
        self.job, self.tag = job, job.tag or 0
        self.has_ended, self.waits = False, False
        self.warm = ()
        self._shared = shared
        self._process = shared.worker._process
        reader, self._writer = Pipe(duplex=False)
        assert isinstance(reader, Connection)
        self.connection = reader
        self._ending = threading.Event()

    def take(self, name: str, message: list[bytes]) -> None:
        """Take a message of the worker; called by the thread that reads them."""
        if name in ("end", "error"):
            _, value = receive(_Bytes(message))
            shared, worker = self._shared, self._shared.worker
            worker.warm = value.get("warm", ())
            shared.is_fit = shared.is_fit and bool(value.get("waits"))
            shared.forget(self)
            worker.waits = worker.has_ended = shared.is_fit and not shared.num_jobs
            self._ending.set()
        try:
            for part in message:
                self._writer.send_bytes(part)
        except OSError:
            logging.getLogger(__name__).debug("nobody reads the messages of job %d", self.tag)

    def lose(self) -> None:
        """Close the connection: the worker is gone."""
        self._shared.forget(self)
        self._ending.set()
        self._writer.close()

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
        """Close its connection, not the worker."""
        self._shared.forget(self)
        self.connection.close()
        self._writer.close()


class _Bytes:
    """A message in memory, to be read as from a connection."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = iter(parts)

    def recv_bytes(self) -> bytes:
        return next(self._parts)

    def send_bytes(self, buf: Any, /) -> None:
        raise AssertionError("a message that was received")
