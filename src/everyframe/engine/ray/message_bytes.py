"""A message between processes as one value of bytes, for transports other than a connection.

The form is that of `worker_process.send`: JSON of our own data, and arrays as they lie in memory.
Nothing is pickled or unpickled. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from everyframe.core.errors import CorruptRunError
from everyframe.engine.workers.worker_process import receive, send

_LENGTH = 8


def to_bytes(name: str, value: Any = None) -> bytes:
    """A message as bytes. Raises `NotSerializableError` if the value can't be serialized."""
    buffer = _Buffer()
    send(buffer, name, value)
    return b"".join(buffer.pieces)


def from_bytes(data: bytes) -> tuple[str, Any]:
    """Name and value of a message. Raises `CorruptRunError` if it is cut off or none of ours."""
    try:
        return receive(_Buffer(memoryview(data)))
    except (EOFError, ValueError, LookupError, TypeError) as error:
        raise CorruptRunError(f"a message of {len(data)} bytes can't be read: {error}") from error


class _Buffer:
    """A channel in memory: each piece after its length."""

    def __init__(self, data: memoryview | None = None) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._left = memoryview(b"") if data is None else data

    def send_bytes(self, buf: Any, /) -> None:
        view = memoryview(buf).cast("B")
        self.pieces += [view.nbytes.to_bytes(_LENGTH, "big"), view]

    def recv_bytes(self) -> bytes:
        size = int.from_bytes(self._take(_LENGTH), "big")
        return bytes(self._take(size))

    def _take(self, size: int) -> memoryview:
        if size > len(self._left):
            raise EOFError("it ends too early")
        taken, self._left = self._left[:size], self._left[size:]
        return taken
