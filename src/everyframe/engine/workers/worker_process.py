"""Parent's handle of a worker process, its job, and the messages between them.

`launcher.py` starts workers and consumes their messages; `worker.py` is the other side. Imports no
torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from everyframe.core.bytes import describe_process_shortage
from everyframe.core.errors import CannotRunError, OutOfMemoryInfo
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.engine.workers.torchrun import TorchrunRank
from everyframe.engine.workers.worker_start import take_worker
from everyframe.hardware.cpu import processor_facts
from everyframe.precision.dtypes import dtype_name

#: Seconds for a worker to exit after its last message.
_PATIENCE = 20.0


@dataclass(frozen=True)
class WorkerJob:
    """Job of a worker: run a request, or resume the run in the folder `run`.

    Attributes:
        request: the request, for a new run.
        run: run folder, for a resumed run.
        num_threads: CPU threads; None for the default.
        root: folder of runs to save in.
        run_name: name of the new run in `root`, given by the launcher of ranks on several machines;
            each machine saves the state of its own ranks. None if rank 0 names it.
        output: requested output path.
        as_uint8: save frames as uint8.
        skip: seeds whose videos are not wanted again.
        pace: how often state is saved; see `everyframe.runs.run_state`.
        rank: number of this worker's rank.
        weights: one entry per rank; the plan decides their speeds.
        meeting: file by which ranks meet; see `everyframe.parallel.rendezvous`.
        local: under torchrun, where this process has one rank only: (rank on this machine, ranks on
            this machine).
        ranks: request options that replace the devices of a resumed run.
        out_of_memory: the out-of-memory event of a resumed run, answered by a memory fallback.
        trust_remote_code: confirmed by the person who resumes the run.
        named: options of the resumed run that this person gave again, with absolute paths;
            None for a run that this very call began.
        keeps_run: the run folder stays when the run is done; the caller removes it.
        plans: only plan the request: `Planned` is the one event.
        stays: the worker waits for another job afterwards, and keeps what it loaded.
        batch: names the batch of runs that it may be computed in, of one plan on one device; such
            jobs go to a worker that may be at work on others of the batch. None for a job alone.
        tag: number of a job of a batch, which its messages carry.
        free_memory: bytes by device that count as free at least, since other workers free them
            for the next run; for a job that only plans.
        place: the worker's current folder; None for that in which it was started.
        temporary: where that `folder` is created; None for the system's temporary folder.
        folder: for the flight recorder and the worker's output.
        log_level: level of the worker's log records.
    """

    request: Request | None = None
    run: Path | None = None
    num_threads: int | None = None
    root: Path | None = None
    run_name: str | None = None
    output: str | None = None
    as_uint8: bool = False
    skip: tuple[int, ...] = ()
    pace: tuple[float, float] | None = None
    rank: int = 0
    weights: tuple[float, ...] = (1.0,)
    meeting: Path | None = None
    local: tuple[int, int] | None = None
    ranks: Mapping[str, Any] | None = None
    out_of_memory: OutOfMemoryInfo | None = None
    trust_remote_code: bool = False
    named: Mapping[str, Any] | None = field(default_factory=dict)
    keeps_run: bool = False
    plans: bool = False
    stays: bool = False
    batch: str | None = None
    tag: int | None = None
    free_memory: Mapping[str, int] = field(default_factory=dict)
    place: Path | None = None
    temporary: Path | None = None
    folder: Path = field(default_factory=Path)
    log_level: str = "WARNING"

    def of_ranks(self, number: int, torchrun: TorchrunRank | None = None) -> WorkerJob:
        """The same job for that many ranks, or for those that torchrun started."""
        if torchrun is None or torchrun.size == 1:
            return replace(self, weights=(1.0,) * number)
        local = torchrun.local_rank, torchrun.local_size
        return replace(self, weights=(1.0,) * torchrun.size, rank=torchrun.rank, local=local)


class Worker:
    """Handle of one worker process and its connection.

    Attributes:
        job: its job, or the last one.
        has_ended: whether it has done that job to its end.
        waits: whether it waits for another job.
        warm: what it keeps loaded, as of its last job: model, bytes, time of the last use and
            device of each component.
    """

    def __init__(self) -> None:
        self.job = WorkerJob()
        self.has_ended, self.waits = False, True
        self.warm: Sequence[tuple[str, int, float, str]] = ()
        started = take_worker()
        self.connection, self._process = started.connection, started.process

    def give(self, job: WorkerJob) -> None:
        """Send it a job.

        Raises:
            OSError: it is gone.
            NotSerializableError: the job can't be sent; the worker waits for another.
        """
        send(self.connection, "job", job)
        self.job, self.has_ended, self.waits = job, False, False

    def receive(self) -> tuple[str, Any]:
        """Receive its next message: ``event``, ``log``, ``error`` or ``end``.

        Raises:
            EOFError: it is gone, even in mid-message.
        """
        name, value = receive(self.connection)
        if name in ("error", "end"):
            self.has_ended = name == "end"
            self.waits, self.warm = value.get("waits", False), value.get("warm", ())
        return name, value

    def stop(self, seconds: float) -> bool:
        """Stop its job at the next step; whether it waits for another job within `seconds`."""
        until = time.monotonic() + seconds
        try:
            send(self.connection, "stop")
            while not self.waits and self.connection.poll(max(0.0, until - time.monotonic())):
                self.receive()
        except (OSError, EOFError):  # it is gone
            return False
        return self.waits

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def recorder_file(self) -> Path:
        return self.job.folder / f"trail-{self.job.rank}"

    def read_output(self) -> str:
        path = self.job.folder / f"printed-{self.job.rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def process_id(self) -> int:
        return self._process.pid

    def has_died(self) -> bool:
        """Whether it exited with an error."""
        return self._process.poll() not in (None, 0)

    def end(self) -> int:
        """Wait for exit, or terminate it; return its exit code, negative for a signal."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kill the worker at once; return its exit code, negative for a signal."""
        self.end_now()
        code = self._process.wait()
        self.connection.close()
        return code

    def end_now(self) -> None:
        """Kill the worker; the reader of its connection gets `EOFError`."""
        self.waits, self.warm = False, ()
        self._process.kill()


def check_memory_for_ranks(num_ranks: int) -> None:
    """Check that the processes of so many ranks fit into this machine, before any starts.

    Each rank plans by itself, so a plan that refuses them would come too late.

    Raises:
        CannotRunError: they need more memory than is free; says how many fit.
    """
    shortage = describe_process_shortage(num_ranks, processor_facts())
    if shortage:
        raise CannotRunError(shortage)


class Channel(Protocol):
    """What messages travel through: a connection of processes, or a buffer in memory."""

    def send_bytes(self, buf: Any, /) -> None: ...

    def recv_bytes(self) -> bytes: ...


#: Messages of several threads must not interleave.
_SENDING = threading.Lock()


def send(connection: Channel, name: str, value: Any = None, tag: int | None = None) -> None:
    """Send a message; `tag` is the job of a batch that it is about.

    Raises:
        OSError: the other side is gone.
        NotSerializableError: the value can't be serialized.
    """
    parts: list[Any] = []
    plain = to_jsonable(value, _serializer(parts))
    head = json.dumps([name, tag, len(parts)])
    with _SENDING:
        connection.send_bytes(f"{head}\n{json.dumps(plain)}".encode())
        for part in parts:
            connection.send_bytes(part)


def receive(connection: Channel) -> tuple[str, Any]:
    """Receive the next message.

    Raises:
        EOFError: the other side is gone, even in mid-message.
    """
    name, _, (first, *parts) = receive_raw(connection)
    value = json.loads(first.partition(b"\n")[2])
    return name, from_jsonable(value, lambda mark: _restore(mark, parts))


def receive_raw(connection: Channel) -> tuple[str, int | None, list[bytes]]:
    """Name and tag of the next message, and its bytes as they are; errors as of `receive`.

    Its value is not parsed, which is what a large one costs.
    """
    try:
        first = connection.recv_bytes()
        name, tag, num_parts = json.loads(first.partition(b"\n")[0])
        return name, tag, [first, *(connection.recv_bytes() for _ in range(num_parts))]
    except OSError as error:  # what connections raise in mid-message, and where they are reset
        raise EOFError(f"the other side is gone ({error})") from error


def _serializer(parts: list[Any]) -> Callable[[Any], dict[str, Any] | None]:
    """Serializer that moves arrays, tensors and images into `parts`."""

    def keep(value: Any) -> dict[str, Any] | None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous()
            name = dtype_name(flat.dtype)
            shape = list(flat.shape)
            parts.append(flat.reshape(-1).view(torch.uint8).numpy().data)
            return {"as": "tensor", "part": len(parts) - 1, "dtype": name, "shape": shape}
        if isinstance(value, bytes):
            parts.append(value)
            return {"as": "bytes", "part": len(parts) - 1}
        if isinstance(value, np.generic):
            return {"as": "number", "dtype": value.dtype.name, "value": value.item()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            plain = np.ascontiguousarray(value)
            parts.append(plain.reshape(-1).view(np.uint8).data)
            shape, dtype = list(value.shape), plain.dtype.str
            return {"as": "array", "part": len(parts) - 1, "dtype": dtype, "shape": shape}
        pictures = sys.modules.get("PIL.Image")
        if pictures is not None and isinstance(value, pictures.Image):
            # Late import: a command without pictures does not wait for Pillow.
            from everyframe.media.picture_bytes import encode_picture

            parts.append(encode_picture(value))
            return {"as": "picture", "part": len(parts) - 1}
        return None

    return keep


def _restore(mark: Mapping[str, Any], parts: list[bytes]) -> Any:
    kind = mark["as"]
    if kind == "number":
        return np.dtype(mark["dtype"]).type(mark["value"])
    data = parts[mark["part"]]
    if kind == "bytes":
        return data
    if kind == "array":
        return np.frombuffer(data, mark["dtype"]).reshape(mark["shape"])
    if kind == "picture":
        from everyframe.media.picture_bytes import decode_picture

        return decode_picture(data)
    import torch

    if not data:
        return torch.empty(mark["shape"], dtype=getattr(torch, mark["dtype"]))
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, mark["dtype"]))
    return flat.reshape(mark["shape"])
