"""Messages between the process that shows and writes and those that compute. No torch here.

A message is a name and a value of ours (`everyframe.core.plain`); arrays follow it as raw bytes,
so frames are copied once and nothing is left behind when either side is killed. Both ends are our
own processes, started by one another. Read next: `launch.py`, `worker.py`.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from everyframe.core.plain import from_plain, to_plain

#: A message is sent in one go, also where several threads have something to tell.
_SENDING = threading.Lock()


def send(connection: Connection, name: str, value: Any = None) -> None:
    """Send a message. Raises `OSError` if nobody is there, `NotPlainError` for what can't go."""
    parts: list[Any] = []
    plain = to_plain(value, _taking(parts))
    head = {"name": name, "value": plain, "parts": len(parts)}
    with _SENDING:
        connection.send_bytes(json.dumps(head).encode())
        for part in parts:
            connection.send_bytes(part)


def receive(connection: Connection) -> tuple[str, Any]:
    """The next message. Raises `EOFError` if the other side is gone, maybe in the middle of one."""
    head = json.loads(connection.recv_bytes())
    parts = [connection.recv_bytes() for _ in range(head["parts"])]
    return head["name"], from_plain(head["value"], lambda mark: _made(mark, parts))


def _taking(parts: list[Any]) -> Callable[[Any], dict[str, Any] | None]:
    """Puts arrays, tensors and pictures into `parts`."""

    def keep(value: Any) -> dict[str, Any] | None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous()
            name = str(flat.dtype).removeprefix("torch.")
            shape = list(flat.shape)
            parts.append(flat.reshape(-1).view(torch.uint8).numpy().data)
            return {"as": "tensor", "part": len(parts) - 1, "dtype": name, "shape": shape}
        if isinstance(value, np.generic):
            return {"as": "number", "dtype": value.dtype.name, "value": value.item()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            plain = np.ascontiguousarray(value)
            parts.append(plain.reshape(-1).view(np.uint8).data)
            shape, dtype = list(value.shape), plain.dtype.str
            return {"as": "array", "part": len(parts) - 1, "dtype": dtype, "shape": shape}
        pictures = sys.modules.get("PIL.Image")
        if pictures is not None and isinstance(value, pictures.Image):
            written = io.BytesIO()
            value.save(written, "PNG", exif=value.getexif())
            parts.append(written.getvalue())
            return {"as": "picture", "part": len(parts) - 1}
        return None

    return keep


def _made(mark: Mapping[str, Any], parts: list[bytes]) -> Any:
    kind = mark["as"]
    if kind == "number":
        return np.dtype(mark["dtype"]).type(mark["value"])
    data = parts[mark["part"]]
    if kind == "array":
        return np.frombuffer(data, mark["dtype"]).reshape(mark["shape"])
    if kind == "picture":
        from PIL import Image

        return Image.open(io.BytesIO(data))
    import torch

    if not data:
        return torch.empty(mark["shape"], dtype=getattr(torch, mark["dtype"]))
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, mark["dtype"]))
    return flat.reshape(mark["shape"])
