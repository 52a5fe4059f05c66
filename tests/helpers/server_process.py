"""A server in a process of its own, which a test may kill, and a client of it.

Run as a program it is ``everyframe serve`` with a made-up executor that writes each step into a
file: ``python server_process.py PAUSE STEPS_FILE serve WORDS…``.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

import everyframe

SOURCE = Path(everyframe.__file__).parents[1]
TESTS = Path(__file__).parents[1]


class ServerProcess:
    """``everyframe serve`` over a data folder; `pause` seconds a step of a made-up executor."""

    def __init__(
        self, folder: Path, *words: str, pause: float | None = None, port: int = 0
    ) -> None:
        self.folder = folder
        self.steps_file = folder.with_name("steps")
        program = ["-m", "everyframe"]
        if pause is not None:
            program = [str(Path(__file__)), str(pause), str(self.steps_file)]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("EVERYFRAME_")}
        path = os.pathsep.join([str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [
                sys.executable,
                *program,
                "serve",
                "--port",
                str(port),
                "--data-dir",
                str(folder),
                *words,
            ],
            env={**variables, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.printed: list[str] = []
        self.url = self._address()

    def _address(self) -> str:
        assert self.process.stdout is not None
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if select.select([self.process.stdout], [], [], 1)[0]:
                line = self.process.stdout.readline()
                self.printed.append(line)
                if found := re.match(r"serving on (http://\S+); data in ", line):
                    return found[1]
                if not line:
                    break
        self.process.kill()
        raise AssertionError(f"it did not begin: {self.printed} {self.process.communicate()[1]}")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def next_line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, path: str, data: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer; `data` is posted as JSON."""
        body = None if data is None else json.dumps(data).encode()
        asked = urllib.request.Request(
            self.url + path, body, {"content-type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text

    def create(self, **options: Any) -> str:
        """The id of a new job."""
        options = {"prompt": "a red circle moves to the right", **options}
        status, job = self.ask("/v1/videos", options)
        assert status == 200, job
        return str(job["id"])

    def wait_for(self, id: str, done: Any, seconds: float = 60) -> dict[str, Any]:  # noqa: A002
        """The job once ``done(job)`` is true; `done` may be a status."""
        until, job = time.monotonic() + seconds, {}
        while time.monotonic() < until:
            job = self.ask(f"/v1/videos/{id}")[1]
            if job["status"] == done if isinstance(done, str) else done(job):
                return job
            if job["status"] in ("failed", "cancelled"):
                break
            time.sleep(0.05)
        raise AssertionError(f"not {done}: {job.get('status')}, {job.get('error')}; {job}")

    def wait_for_steps(self, number: int) -> None:
        """Wait until the made-up executor took that many steps in all."""
        until = time.monotonic() + 30
        while len(self.steps()) < number:
            assert time.monotonic() < until, self.steps()
            time.sleep(0.01)

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self._close()

    def _close(self) -> None:
        self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def stop(self, seconds: float = 20, by: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code after the signal, and the seconds until then."""
        began = time.monotonic()
        self.process.send_signal(by)
        code = self.process.wait(seconds)
        took = time.monotonic() - began
        self._close()
        return code, took

    def steps(self) -> list[list[int]]:
        """(seed, step) of every step that the made-up executor ever took."""
        if not self.steps_file.exists():
            return []
        return [[int(word) for word in line.split()] for line in
                self.steps_file.read_text().splitlines()]  # fmt: skip


def _main(pause: str, steps_file: str, *words: str) -> int:
    from everyframe.cli import serve
    from everyframe.cli.main import main
    from helpers.fake_executor import FakeExecutor

    class Logged(list[Any]):
        def append(self, step: tuple[int, int]) -> None:
            with Path(steps_file).open("a") as file:
                file.write(f"{step[0]} {step[1]}\n")

    def start() -> FakeExecutor:
        executor = FakeExecutor(float(pause))
        executor.steps = Logged()
        return executor

    serve._executor = lambda kind, given: start  # type: ignore[assignment,return-value]
    return main(words)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
