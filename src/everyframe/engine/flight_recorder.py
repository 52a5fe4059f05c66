"""What a worker is at: stage, step and the module that is called, readable after it has died.

It is written into a mapped file, which the system keeps whatever becomes of the process: a name is
a number in it, and a call costs a few bytes of memory and no call of the system. No torch here.
Read next: `worker.py`, which writes it, and `worker_monitor.py`, which reads it.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everyframe.core.errors import MediaError

_SIZE, _TEXT, _WAIT, _READ, _MOST = 4096, 2048, 3072, 3584, 6
#: Number of the module, of the dtype, of dimensions, and these.
_CALL = struct.Struct(f"<iii{_MOST}i")
_LENGTH = struct.Struct("<i")
#: How often it waited, and the number of what it waits for.
_WAITS = struct.Struct("<ii")
#: How often a read began or ended, and how many go on.
_READS = struct.Struct("<ii")
_NAMES = ".names"


@dataclass(frozen=True)
class LastPosition:
    """What a process was at: `module` and `operand` are empty before the first module is called.

    `module` is a dotted name with its class behind it, `operand` the shape and dtype of the first
    tensor that it was called with. `waiting` says what a rank waits for others for, `is_reading`
    whether weights were being read.
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
        step = f"step {self.step} of {self.num_steps} of " if self.num_steps else ""
        module = f", in {self.module}" if self.module else ""
        return f"in {step}{self.stage}{module}" + (f" on {self.operand}" if self.operand else "")


class FlightRecorder:
    """Written by the process that computes.

    Raises `MediaError` where it can't be: the disk is full, or a limit on files reached.
    """

    def __init__(self, path: Path) -> None:
        with _told(path):
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self._names_at = path.with_name(path.name + _NAMES)
        with _told(self._names_at):
            self._names = self._names_at.open("w", encoding="utf-8", buffering=1)
        self._count = 0
        self._waits: dict[str, int] = {"": 0}
        self._call = _CALL.pack_into
        self._reads = threading.Lock()

    def at(self, stage: str, step: int = 0, num_steps: int = 0) -> None:
        """A stage, and the step of it that is under way."""
        text = json.dumps([stage, step, num_steps]).encode()[: _TEXT - _LENGTH.size]
        self._map[_LENGTH.size : _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._map, 0, len(text))
        self._call(self._map, _TEXT, 0, 0, 0, *[0] * _MOST)

    def learn(self, name: str) -> int:
        """The number of a name from now on."""
        with _told(self._names_at):
            self._names.write(json.dumps(name) + "\n")
        self._count += 1
        return self._count

    def wait(self, what: str) -> None:
        """It waits for other ranks from now on, and no longer with an empty text."""
        if what not in self._waits:
            self._waits[what] = self.learn(what)
        number, _ = _WAITS.unpack_from(self._map, _WAIT)
        # Counted, so that one wait can be told from the next.
        _WAITS.pack_into(self._map, _WAIT, (number + 1) % 2**31, self._waits[what])

    def read(self, begins: bool) -> None:
        """A read of weights begins or has ended; several threads may be at it."""
        with self._reads:
            count, under_way = _READS.unpack_from(self._map, _READ)
            under_way += 1 if begins else -1
            _READS.pack_into(self._map, _READ, (count + 1) % 2**31, under_way)

    def enter(self, module: int, dtype: int, shape: Sequence[int]) -> None:
        """A module is called with a tensor of that shape; numbers of `learn`, 0 for unknown."""
        count = min(len(shape), _MOST)
        self._call(self._map, _TEXT, module, dtype, count, *shape[:_MOST], *[0] * (_MOST - count))


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Within, that file is written."""
    try:
        yield
    except OSError as error:
        raise MediaError(
            f"can't write {str(path)!r}, which says where a run is: {error.strerror or error}; "
            "free some space there, or name another folder in TMPDIR"
        ) from error


def read_last_position(path: Path) -> LastPosition:
    """What the process was at when it wrote last."""
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
        # It died while it wrote that; where it was stays unknown.
        return LastPosition()
