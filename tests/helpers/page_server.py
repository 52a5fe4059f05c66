"""`everyframe serve` as a process that can be killed and come back, and a browser for its page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SERVE = "import sys; from everyframe.cli.main import main; sys.exit(main())"
#: Chromium by the names of Debian, Ubuntu, Fedora and of Google's own package.
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Path of a Chromium: ``EVERYFRAME_CHROMIUM``, else one on the path; None without one."""
    named = os.environ.get("EVERYFRAME_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _BROWSERS)), None)


class PageServer:
    """A server in a process of its own, with a data folder and a port that stay over a restart."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self._environment = folder, environment or {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder.with_suffix(".log")

    def start(self) -> None:
        """Start it and wait until it answers."""
        # The tests' own environment runs engines in this process; a server has workers.
        environment = {k: v for k, v in os.environ.items() if k != "EVERYFRAME_IN_PROCESS"}
        environment |= {"EVERYFRAME_SERVER_DIR": str(self.folder), **self._environment}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "/tmp/t-page/real.py", str(self.port), str(self.folder)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        ends = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < ends, self._log.read_text()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            self.call("GET", "/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """JSON of an answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def fetch(self, path: str) -> bytes:
        """Bytes of an answer."""
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            found: bytes = answer.read()
            return found

    def make_video(self, prompt: str, seed: int, **options: Any) -> str:
        """Make a video to its end; its id."""
        made = self.call("POST", "/v1/videos", {"prompt": prompt, "seed": seed, **options})["id"]
        self.wait(made, "completed")
        return str(made)

    def wait(self, id: str, status: str, seconds: float = 120) -> None:  # noqa: A002
        """Wait until a job has that status."""
        ends = time.monotonic() + seconds
        while (job := self.call("GET", f"/v1/videos/{id}"))["status"] != status:
            assert time.monotonic() < ends and job["status"] != "failed", job
            time.sleep(0.2)

    def delete_all(self) -> None:
        """Delete every job."""
        for job in self.call("GET", "/v1/videos?limit=100")["data"]:
            self.call("DELETE", f"/v1/videos/{job['id']}")

    def kill(self) -> None:
        """Kill the server alone, as ``kill -9`` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
