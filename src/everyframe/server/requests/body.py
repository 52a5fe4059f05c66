"""Read a request's body, JSON, multipart or form, into fields and uploads, within limits.

`request_parser.py` gives the fields their meaning.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from fastapi import Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Message

from everyframe.core.bytes import format_bytes
from everyframe.server.errors import ApiError
from everyframe.server.settings import Limits

#: ``name[]`` and ``name[key]``, as clients write lists and objects in forms.
_BRACKETS = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")
#: Bytes that a slow body must bring in `Limits.body_seconds`.
_LEAST_BYTES = 512 * 1024
#: Bytes of a body that is parsed in the event loop, where it holds up others for a millisecond.
_SMALL_BYTES = 16 * 1024
_T = TypeVar("_T")


@dataclass(frozen=True)
class Body:
    """A body that was read.

    Attributes:
        fields: values by name: texts of a form, any JSON of a JSON body.
        files: uploads by the name of their field.
        digest: SHA-256 of the body and its form, in hexadecimal.
        is_small: whether it is quick to parse.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    digest: str = ""
    is_small: bool = False


async def read_body(request: Request, limits: Limits) -> Body:
    """Read and parse the body of a request.

    Raises:
        ApiError: it is too large or too slow, or none of the three forms.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("not_supported", "compressed bodies are not read; send it as it is")
    data = _CountedBody(request, limits)
    if kind == "multipart/form-data":
        fields, files = await _read_multipart(request, data, limits)
    elif kind == "application/x-www-form-urlencoded":
        text = await data.whole()
        fields, files = await _off_loop(data.is_small, _read_form, text, limits), {}
    elif kind == "application/json" or kind.endswith("+json"):
        text = await data.whole()
        fields, files = await _off_loop(data.is_small, _read_json, text), {}
    else:
        if await data.whole():
            raise ApiError(
                "not_supported",
                f"the body must be application/json, multipart/form-data or a form, got {kind!r}",
            )
        fields, files = {}, {}
    digest = await _off_loop(data.is_small, _digest, fields, files)
    return Body(fields, files, digest, data.is_small)


async def _off_loop(is_quick: bool, function: Callable[..., _T], *values: Any) -> _T:
    """Call a function, in a thread unless it is quick, so no large body blocks other clients."""
    return function(*values) if is_quick else await anyio.to_thread.run_sync(function, *values)


def _digest(fields: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    """Hash of the parsed content, since a multipart body has another boundary each time."""
    found = hashlib.sha256(json.dumps(fields, sort_keys=True).encode("utf-8", "surrogatepass"))
    for name in sorted(files):
        found.update(f"\0{name}\0".encode())
        found.update(hashlib.sha256(files[name]).digest())
    return found.hexdigest()


class _CountedBody:
    """The body as it arrives, with its bytes counted and its pauses timed."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._request, self._limits = request, limits
        self._began, self._size = time.monotonic(), 0
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limits.body_bytes:
            raise self._too_large()

    @property
    def is_small(self) -> bool:
        """Whether the bytes so far are quick to parse."""
        return self._size <= _SMALL_BYTES

    async def whole(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> Any:
        """Its pieces. Raises `ApiError` for a body that is too large or too slow."""
        more = True
        while more:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ApiError("invalid_value", "the connection ended within the body")
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            self._size += len(chunk)
            if self._size > self._limits.body_bytes:
                raise self._too_large()
            if chunk:
                yield chunk

    async def _next(self) -> Message:
        allowed = self._limits.body_seconds
        budget = allowed * (1 + self._size / _LEAST_BYTES) - (time.monotonic() - self._began)
        try:
            with anyio.fail_after(min(allowed, max(budget, 0))):
                return await self._request.receive()
        except TimeoutError:
            raise ApiError(
                "too_slow",
                f"the body came too slowly: {self._size} bytes in "
                f"{time.monotonic() - self._began:.0f} seconds",
                headers={"connection": "close"},
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            "too_large",
            f"the body is larger than {format_bytes(self._limits.body_bytes)}; send less",
            headers={"connection": "close"},
        )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _read_json(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError("invalid_value", "the body nests too deeply") from None
    except ValueError as error:
        raise ApiError("invalid_value", f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError("invalid_value", "the body must be a JSON object")
    return found


async def _read_multipart(
    request: Request, data: _CountedBody, limits: Limits
) -> tuple[dict[str, Any], dict[str, bytes]]:
    parser = MultiPartParser(
        request.headers,
        data.chunks(),
        max_files=limits.num_files,
        max_fields=limits.num_fields,
        max_part_size=limits.field_bytes,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        code = "too_large" if "maximum" in error.message.lower() else "invalid_value"
        text = error.message[:1].lower() + error.message[1:]
        raise ApiError(code, f"the multipart body can't be read: {text}") from None
    except (FormParserError, KeyError, UnicodeDecodeError, LookupError) as error:
        raise ApiError("invalid_value", f"the multipart body can't be read: {error}") from None
    files: dict[str, bytes] = {}
    texts: list[tuple[str, str]] = []
    try:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                texts.append((name, value))
            elif name in files:
                raise ApiError("invalid_value", f"{name} has two files; give one of them", name)
            else:
                files[name] = await value.read()
    finally:
        await form.close()
    return _nest(texts), files


def _read_form(data: bytes, limits: Limits) -> dict[str, Any]:
    try:
        texts = parse_qsl(
            data.decode(), keep_blank_values=True, errors="strict", max_num_fields=limits.num_fields
        )
    except UnicodeDecodeError as error:
        raise ApiError("invalid_value", f"the form can't be read: {error}") from None
    except ValueError:  # counted before any is parsed
        text = f"a form has at most {limits.num_fields} fields"
        raise ApiError("too_large", text) from None
    return _nest(texts)


def _nest(texts: list[tuple[str, str]]) -> dict[str, Any]:
    """Fields of a form, with ``name[]`` as a list and ``name[key]`` as an object."""
    found: dict[str, Any] = {}
    for given, value in texts:
        brackets = _BRACKETS.fullmatch(given)
        name, put = brackets.groups() if brackets else (given, None)
        if put is None:
            if name in found:
                raise ApiError("invalid_value", f"{name} is given twice; give it once", name)
            found[name] = value
        elif put == "" and isinstance(found.setdefault(name, []), list):
            found[name].append(value)
        elif put and isinstance(found.setdefault(name, {}), dict) and put not in found[name]:
            found[name][put] = value
        else:
            raise ApiError("invalid_value", f"{name} is given in two forms; give it once", name)
    return found
