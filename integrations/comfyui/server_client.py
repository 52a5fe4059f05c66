"""A client of ``everyframe serve``: JSON, files and server-sent events, by the standard library."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Beginning of the variables with keys, as in
#: ``COMFYUI_EVERYFRAME_KEY_STUDIO="http://studio:8000 THE-KEY"``. Not EVERYFRAME_, which reports on
#: a machine show.
KEY_PREFIX = "COMFYUI_EVERYFRAME_KEY_"
#: Seconds for an answer. A stream of events brings something every 15 seconds.
_ANSWER_SECONDS, _STREAM_SECONDS = 60.0, 40.0


class ServerError(RuntimeError):
    """The server refuses or fails; the text is the server's, or says what to do."""


class UnreachableError(ServerError):
    """The server does not answer."""


@dataclass(frozen=True)
class Connection:
    """An Everyframe server and the name of its key, as the node *Everyframe Server* gives it."""

    url: str
    key_name: str = ""

    def key(self) -> str | None:
        """The key for this server, from the environment: a workflow holds its name alone.

        The variable names the server too, so that no workflow sends a key elsewhere.

        Raises:
            ValueError: there is no such key, or it belongs to another server.
        """
        if not self.key_name:
            return None
        if not re.fullmatch(r"\w+", self.key_name):
            raise ValueError(f"key_name must be letters and digits, got {self.key_name!r}")
        variable = KEY_PREFIX + self.key_name.upper()
        address, _, key = os.environ.get(variable, "").strip().partition(" ")
        if not key.strip():
            raise ValueError(
                f"there is no key {self.key_name!r}; start ComfyUI with "
                f'{variable}="{_origin(self.url)} THE-KEY"'
            )
        if _origin(address) != _origin(self.url):
            raise ValueError(
                f"the key {self.key_name!r} belongs to {_origin(address)}, and is not sent to "
                f"{_origin(self.url)}"
            )
        return key.strip()


def check_url(url: str) -> str | None:
    """What is wrong with a server's address, or None."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.username or parts.query or parts.fragment:
        return f"url must be an address such as http://127.0.0.1:8000, got {url!r}"
    return None


def _origin(url: str) -> str:
    parts = urllib.parse.urlsplit(url.rstrip("/"))
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would carry the key to another server."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass
class ServerClient:
    """Requests to one server. Its methods raise `ServerError`."""

    connection: Connection
    _key: str | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        wrong = check_url(self.connection.url)
        if wrong is not None:
            raise ValueError(wrong)
        self._key = self.connection.key()
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(
        self, path: str, data: Mapping[str, Any] | None = None, seconds: float = _ANSWER_SECONDS
    ) -> dict[str, Any]:
        """The JSON answer; `data` is posted as JSON."""
        with closing(self._open(path, data, seconds)) as answer:
            try:
                found = json.load(answer)
            except (ValueError, OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
        if not isinstance(found, dict):
            raise ServerError(f"{self.connection.url} is no Everyframe server: {path} is no object")
        return found

    def download(self, path: str, file: Path) -> None:
        """Write an answer to `file`."""
        with closing(self._open(path, None, _ANSWER_SECONDS)) as answer, file.open("wb") as target:
            try:
                shutil.copyfileobj(answer, target)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def events(self, path: str, after: str | None) -> Iterator[tuple[str, str | None, Any]]:
        """Events of a stream: type, number, data. `after` is the number of the last one seen."""
        headers = {} if after is None else {"last-event-id": after}
        with closing(self._open(path, None, _STREAM_SECONDS, headers)) as answer:
            try:
                yield from parse_events(answer)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def _open(
        self,
        path: str,
        data: Mapping[str, Any] | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        body = None if data is None else json.dumps(data).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        if self._key is not None:
            sent["authorization"] = f"Bearer {self._key}"
        url = self.connection.url.rstrip("/") + path
        try:
            return self._opener.open(urllib.request.Request(url, body, sent), timeout=seconds)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise ServerError(_message(error, self.connection)) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = getattr(error, "reason", None) or error
        return UnreachableError(
            f"{self.connection.url} does not answer ({reason}); start `everyframe serve` there, "
            "or correct the url of the Everyframe Server node"
        )


def parse_events(lines: Iterable[bytes]) -> Iterator[tuple[str, str | None, Any]]:
    """Events in the form of ``text/event-stream``: type, number and JSON data of each."""
    kind, number, data = "message", None, []
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "id":
            number = value
        elif name == "data":
            data.append(value)
        elif not text:
            if data:
                yield kind, number, json.loads("\n".join(data))
            kind, data = "message", []


def _message(error: urllib.error.HTTPError, connection: Connection) -> str:
    """The text of an error's answer, with what to do where the key is wrong."""
    try:
        text = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        text = f"{connection.url} answers {error.code} {error.reason}; is it an Everyframe server?"
    if error.code == 401:
        text += f"; give key_name, and start ComfyUI with {KEY_PREFIX}NAME set"
    return text
