"""A fake worker that the test controls: it takes jobs, sends given messages, and dies."""

from __future__ import annotations

import os
import struct
import subprocess
from multiprocessing.connection import Connection, Pipe
from typing import Any

from everyframe.engine.ray.message_bytes import to_bytes
from everyframe.engine.workers.worker_process import Worker, WorkerJob, receive, send


class FakeWorker(Worker):
    """A process that only waits; `theirs` is the connection that a worker would have."""

    def __init__(self) -> None:
        self.job = WorkerJob()
        self.has_ended, self.waits = False, True
        self.warm = ()
        self.connection, theirs = Pipe()
        assert isinstance(theirs, Connection)
        self.theirs = theirs
        self._process = subprocess.Popen(["sleep", "600"])

    def next_job(self) -> WorkerJob:
        """The next job that it was given."""
        name, job = receive(self.theirs)
        assert name == "job", name
        assert isinstance(job, WorkerJob)
        return job

    def say(self, name: str, value: Any = None, job: WorkerJob | None = None) -> None:
        """Send a message about a job of a batch, or without one."""
        send(self.theirs, name, value, None if job is None else job.tag)

    def end_job(self, job: WorkerJob | None = None) -> None:
        """Say that a job has ended, and wait for the next one."""
        self.say("end", {"waits": True, "warm": []}, job)

    def die(self) -> None:
        """End as a killed process does."""
        self._process.kill()
        self._process.wait()
        self.theirs.close()

    def die_in_mid_message(self, num_bytes: int) -> None:
        """Die once so many bytes of a message are sent."""
        data = to_bytes("event", "x" * 100)
        whole = struct.pack("!i", len(data) - 8) + data[8:]  # as a connection sends it
        assert num_bytes < len(whole)
        os.write(self.theirs.fileno(), whole[:num_bytes])
        self.die()

    def end_now(self) -> None:
        super().end_now()
        self.theirs.close()
