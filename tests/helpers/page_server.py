"""A server with real workers for tests of the web page; a restart keeps its address."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from helpers.server_process import ServerProcess

#: Seconds for the first video, for which workers load torch, on a busy machine.
_LONG = 240


class PageServer:
    """``everyframe serve`` over `folder`, which can be killed and started again."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder, self._words = folder, words
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self._server = ServerProcess(self._folder, *self._words, port=self._port)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._server.kill()

    def stop(self) -> None:
        """End it in order, its workers too."""
        self._server.stop(seconds=60)

    def ask(self, path: str, data: Any = None, method: str | None = None) -> Any:
        """JSON or bytes of an answer that is no error."""
        status, answer = self._server.ask(path, data, method)
        assert status == 200, answer
        return answer

    def make_video(self, prompt: str, seed: int, **options: Any) -> str:
        """Make a video to its end; its id."""
        made = self._server.create(prompt=prompt, seed=seed, **options)
        self._server.wait_for(made, "completed", _LONG)
        return made

    def create(self, prompt: str, **options: Any) -> str:
        """The id of a new job."""
        return self._server.create(prompt=prompt, **options)

    def delete_all(self) -> None:
        """Delete every job."""
        for job in self.ask("/v1/videos?limit=100")["data"]:
            self.ask(f"/v1/videos/{job['id']}", method="DELETE")
