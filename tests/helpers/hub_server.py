"""A local stand-in for the model hub: the part of its HTTP API that a download uses.

It serves folders as repositories at one commit, and records which files were fetched.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789" * 4
#: Larger files have their sha256 for a name, as the hub's large files do.
_LARGE = 4096


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`: hub id -> folder. `fetched` holds the files that were asked for."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub_server(repositories: Mapping[str, Path]) -> Iterator[HubServer]:
    """Context: the running server."""
    server = HubServer(repositories)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag_of(path: Path) -> str:
    """What the hub calls a file's content: the sha256 of a large one, git's name of a small one."""
    data = path.read_bytes()
    if len(data) > _LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _entry(path: Path, name: str) -> dict[str, Any]:
    """A file as the hub lists it."""
    size, etag = path.stat().st_size, etag_of(path)
    entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": etag[:40]}
    if len(etag) == 64:
        entry["lfs"] = {"oid": etag, "size": size, "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, *, is_head: bool) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self._describe("/".join(words[2:4]), is_tree="tree" in words[4:])
        elif len(words) > 4 and words[2] == "resolve":
            self._give("/".join(words[:2]), "/".join(words[4:]), is_head=is_head)
        else:
            self._send(404, b"")

    def _describe(self, repo_id: str, *, is_tree: bool) -> None:
        folder = self.server.repositories.get(repo_id)
        if folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        names = sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )
        if is_tree:
            entries = [_entry(folder / name, name) for name in names]
            self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
            return
        about = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "private": False, "tags": [],
                 "siblings": [{"rfilename": name} for name in names]}  # fmt: skip
        self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _give(self, repo_id: str, name: str, *, is_head: bool) -> None:
        path = self.server.repositories[repo_id] / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{etag_of(path)}"', "X-Repo-Commit": COMMIT}
        if not is_head:
            self.server.fetched.append(f"{repo_id}/{name}")
        self._send(200, path.read_bytes(), headers, is_head=is_head)

    def _send(
        self, code: int, data: bytes, headers: Mapping[str, str] | None = None, *,
        is_head: bool = False,
    ) -> None:  # fmt: skip
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not is_head and self.command != "HEAD":
            self.wfile.write(data)
