"""Flight recorder of a worker: stage, step and current module, readable after the process dies.

The position is written to a memory-mapped file, which survives the process. Names are stored once
and referenced by number, so recording a module call writes a few bytes and makes no system call.
Imports no torch. `worker.py` writes it; `worker_monitor.py` reads it.
"""

from __future__ import annotations

import errno
import json
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from everyframe.core.errors import MediaError

_SIZE, _TEXT, _WAIT, _READ, _MOST = 4096, 2048, 3072, 3584, 6
#: Module number, dtype number, number of dimensions, dimensions.
_CALL = struct.Struct(f"<iii{_MOST}i")
_LENGTH = struct.Struct("<i")
#: Number of waits so far, number of the name of the current one.
_WAITS = struct.Struct("<ii")
#: Number of reads begun or ended so far, reads in progress.
_READS = struct.Struct("<ii")
_NAMES = ".names"


@dataclass(frozen=True)
class LastPosition:
    """Last recorded position of a process.

    Attributes:
        stage: name of the stage.
        step: current step of the stage.
        num_steps: steps of the stage.
        module: dotted name and class of the current module; empty before the first call.
        operand: shape and dtype of the first tensor argument; empty before the first call.
        waiting: what this rank waits for other ranks for; empty if it does not wait.
        is_reading: whether weights were being read.
    """

    stage: str = ""
    step: int = 0
    num_steps: int = 0
    module: str = ""
    operand: str = ""
    waiting: str = ""
    is_reading: bool = False

    def __str__(self) -> str:
        if not self.stage:
            return "before its first stage"
        where = f"in step {self.step} of {self.num_steps} of " if self.num_steps else "in "
        if 0 < self.num_steps < self.step:  # a pipeline's decoder, or what is yet to be sent
            where = f"after step {self.num_steps} of {self.num_steps} of "
        module = f", in {self.module}" if self.module else ""
        return f"{where}{self.stage}{module}" + (f" on {self.operand}" if self.operand else "")


class FlightRecorder:
    """Writer of the flight recorder file, used by the process that computes.

    Raises `MediaError` if the file can't be created: the disk is full, or a file limit is reached.
    """

    def __init__(self, path: Path) -> None:
        with _write_errors(path):
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self._names_at = path.with_name(path.name + _NAMES)
        with _write_errors(self._names_at):
            self._names = self._names_at.open("w", encoding="utf-8", buffering=1)
        self._count = 0
        self._waits: dict[str, int] = {"": 0}
        self._call = _CALL.pack_into
        self._reads = threading.Lock()

    def close(self) -> None:
        """Close the file of names. Later writes of the position have no reader."""
        with suppress(OSError):  # it writes once more what it could not, which was reported
            self._names.close()

    def at(self, stage: str, step: int = 0, num_steps: int = 0) -> None:
        text = json.dumps([stage, step, num_steps]).encode()[: _TEXT - _LENGTH.size]
        self._map[_LENGTH.size : _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._map, 0, len(text))
        self._call(self._map, _TEXT, 0, 0, 0, *[0] * _MOST)

    def learn(self, name: str) -> int:
        """Assign a number to a name."""
        with _write_errors(self._names_at):
            self._names.write(json.dumps(name) + "\n")
        self._count += 1
        return self._count

    def wait(self, what: str) -> None:
        """Record that this rank waits for other ranks; an empty text ends the wait."""
        if what not in self._waits:
            self._waits[what] = self.learn(what)
        number, _ = _WAITS.unpack_from(self._map, _WAIT)
        # Counted, so that successive waits differ.
        _WAITS.pack_into(self._map, _WAIT, (number + 1) % 2**31, self._waits[what])

    def read(self, begins: bool) -> None:
        """Record the begin or end of a read of weights; several threads may read at once."""
        with self._reads:
            count, under_way = _READS.unpack_from(self._map, _READ)
            under_way += 1 if begins else -1
            _READS.pack_into(self._map, _READ, (count + 1) % 2**31, under_way)

    def enter(self, module: int, dtype: int, shape: Sequence[int]) -> None:
        """Record a module call with a tensor of that shape; numbers from `learn`, 0 is unknown."""
        count = min(len(shape), _MOST)
        self._call(self._map, _TEXT, module, dtype, count, *shape[:_MOST], *[0] * (_MOST - count))


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Context: `MediaError` for a failed write of that file."""
    try:
        yield
    except OSError as error:
        is_limit = error.errno == errno.EFBIG
        fix = "raise the limit of ulimit -f" if is_limit else "free some space there"
        raise MediaError(
            f"can't write {str(path)!r}, the flight recorder of this run: "
            f"{error.strerror or error}; {fix}, or name another folder in TMPDIR"
        ) from error


def read_last_position(path: Path) -> LastPosition:
    """Read the last recorded position from a flight recorder file."""
    try:
        data = path.read_bytes()
        lines = path.with_name(path.name + _NAMES).read_text(encoding="utf-8").splitlines()
        length = _LENGTH.unpack_from(data)[0]
        names = ["", *(json.loads(line) for line in lines)]
        waiting = names[_WAITS.unpack_from(data, _WAIT)[1]]
        is_reading = _READS.unpack_from(data, _READ)[1] > 0
        if not length:
            return LastPosition(waiting=waiting, is_reading=is_reading)
        stage, step, num_steps = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        module, dtype, count, *shape = _CALL.unpack_from(data, _TEXT)
        operand = "x".join(map(str, shape[:count])) + (f" {names[dtype]}" if dtype else "")
        operand = operand if count else ""
        return LastPosition(stage, step, num_steps, names[module], operand, waiting, is_reading)
    except (OSError, ValueError, IndexError, struct.error):
        # It died during that write; the position is unknown.
        return LastPosition()
