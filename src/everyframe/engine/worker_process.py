"""A worker process as the one that started it sees it, and what it is told to do.

Not here: when one is started and what becomes of what it says (`launcher.py`), and its own side
(`worker.py`). No torch here. Read next: `launcher.py`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from everyframe.core.errors import OutOfMemoryInfo
from everyframe.core.request import Request
from everyframe.core.safe_path import SAFE_PATH, SAFE_PATH_VARIABLE
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.engine.torchrun import TorchrunRank

#: Seconds that a worker has to end by itself once it has said all.
_PATIENCE = 20.0

#: What a worker runs. Neither the current folder nor that of the caller's script is on its path;
#: this package is found where it was found here, after everything else.
_START = (
    f"{SAFE_PATH}sys.path.append(sys.argv[2]); "
    "from everyframe.engine.worker import serve; serve(int(sys.argv[1]))"
)
_PLACE_OF_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class WorkerJob:
    """What a worker is to do: make a request, or go on with the run in the folder `run`.

    `root` is the folder of runs to keep it in, `output`, `as_uint8` and `pace` (see
    `everyframe.runs.run_state`) how. `rank` is one of ``len(weights)``, whose speeds are the plan's
    affair; they meet by the file `meeting` (see `everyframe.parallel.rendezvous`). Under torchrun
    this process has that one rank alone, and `local` is its number among those of this machine, and
    how many these are. `ranks` is what a run that was broken off goes on with in place of its own
    devices, by the names of the request's options; `scarcity` what it lacked memory for, to be done
    in less from here on. `trust_remote_code` is said by the person who goes on with it. `folder` is
    for its trail and what it prints.
    """

    request: Request | None = None
    run: Path | None = None
    num_threads: int | None = None
    root: Path | None = None
    output: str | None = None
    as_uint8: bool = False
    skip: tuple[int, ...] = ()
    pace: tuple[float, float] | None = None
    rank: int = 0
    weights: tuple[float, ...] = (1.0,)
    meeting: Path | None = None
    local: tuple[int, int] | None = None
    ranks: Mapping[str, Any] | None = None
    scarcity: OutOfMemoryInfo | None = None
    trust_remote_code: bool = False
    folder: Path = field(default_factory=Path)
    log_level: str = "WARNING"

    def of_ranks(self, number: int, torchrun: TorchrunRank | None = None) -> WorkerJob:
        """The same job for so many ranks, or for those that torchrun started."""
        if torchrun is None or torchrun.size == 1:
            return replace(self, weights=(1.0,) * number)
        local = torchrun.local_rank, torchrun.local_size
        return replace(self, weights=(1.0,) * torchrun.size, rank=torchrun.rank, local=local)


class Worker:
    """One worker process, and the way to it."""

    def __init__(self, job: WorkerJob, place: Path | None) -> None:
        self.job = job
        self.connection, theirs = Pipe()
        assert isinstance(theirs, Connection)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), _PLACE_OF_PACKAGE],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=place,
            env={**os.environ, SAFE_PATH_VARIABLE: "1"},
        )
        theirs.close()

    @property
    def trail(self) -> Path:
        """The file that says what it was at; see `read_trail`."""
        return self.job.folder / f"trail-{self.job.rank}"

    def printed(self) -> str:
        """What was printed in it."""
        path = self.job.folder / f"printed-{self.job.rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def process_id(self) -> int:
        """The system's number of it."""
        return self._process.pid

    def has_died(self) -> bool:
        """Whether it has ended, and not well."""
        return self._process.poll() not in (None, 0)

    def end(self) -> int:
        """Wait until it has ended by itself, or end it; its exit code, negative for a signal."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once; its exit code, negative for a signal."""
        self._process.kill()
        code = self._process.wait()
        self.connection.close()
        return code


#: A message is sent in one go, also where several threads have something to tell.
_SENDING = threading.Lock()


def send(connection: Connection, name: str, value: Any = None) -> None:
    """Send a message. Raises `OSError` if nobody is there, `NotSerializableError` for what can't
    go.
    """
    parts: list[Any] = []
    plain = to_jsonable(value, _taking(parts))
    head = {"name": name, "value": plain, "parts": len(parts)}
    with _SENDING:
        connection.send_bytes(json.dumps(head).encode())
        for part in parts:
            connection.send_bytes(part)


def receive(connection: Connection) -> tuple[str, Any]:
    """The next message. Raises `EOFError` if the other side is gone, maybe in the middle of one."""
    head = json.loads(connection.recv_bytes())
    parts = [connection.recv_bytes() for _ in range(head["parts"])]
    return head["name"], from_jsonable(head["value"], lambda mark: _made(mark, parts))


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
