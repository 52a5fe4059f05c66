"""Exclusive access to torch's process-wide switches: one run at a time sets them.

Attention kernels, TF32 and accumulation width are one value each for all threads. A run that needs
its own values sets them while it computes one event, exclusively, and restores them before another
run computes. Runs that set nothing (an in-memory pipeline) compute concurrently. Waiting threads
are served in order of arrival and hold no turn meanwhile, so they cannot deadlock. Threads of
others are not blocked: their attention may use another kernel while a run of ours computes.

The switches are in `everyframe.ops.attention` and `everyframe.precision.strict_float32`; torch's
state per thread is in `thread_state.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue

#: Seconds between wake-ups of a waiting thread, so that it raises exceptions sent to it.
_PATIENCE = 0.2


class Turn:
    """Reentrant lock of one run: entered to compute an event, left while the event is read.

    An exclusive turn excludes all other turns. Entering again has no effect in the same run, also
    in a thread that was started within with a copy of its context. Entering within another run's
    turn (from a hook of that run) suspends that turn, or becomes a part of it if it is exclusive.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        # For each entry: whether it is part of another turn, the turn before, and the turn to
        # restore.
        self._before: list[tuple[bool, Turn | None, Turn | None]] = []

    @property
    def is_held(self) -> bool:
        return _PROCESS.is_held(self)

    def __enter__(self) -> Turn:
        before = _TURN.get()
        held = before if before is not None and before.is_held else None
        # Inside an exclusive turn, every turn is part of it.
        is_part = held is not None and (held is self or held.is_alone)
        self._before.append((is_part, before, held))
        if is_part:
            return self
        _TURN.set(self)
        try:
            if held is not None:
                _PROCESS.give(held)
            _PROCESS.take(self)
        except BaseException:  # an interrupt while it waits
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        is_part, before, held = self._before.pop()
        if is_part:
            return
        _PROCESS.give(self)
        _TURN.set(before)
        if held is not None:
            _PROCESS.take(held)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context: release the turn, then take it again unless an exception is raised.

        An exception must propagate without waiting for other runs.
        """
        was_held = self.is_held
        _PROCESS.give(self)
        yield
        if was_held:
            _PROCESS.take(self)


class _Process:
    """Runs that hold a turn in this process, and threads that wait for one.

    A turn is released without a lock: garbage collection of an abandoned generator may release it
    at any point of a thread that has the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[SimpleQueue[None]] = []
        self._holders: set[Turn] = set()

    def is_held(self, turn: Turn) -> bool:
        return turn in self._holders

    def take(self, turn: Turn) -> None:
        place: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(place)
        try:
            while not self._admits(turn, place):
                with suppress(Empty):
                    place.get(timeout=_PATIENCE)
        finally:
            self._waiting.remove(place)
            self._wake()

    def give(self, turn: Turn) -> None:
        """Release the turn; does nothing if it is not held."""
        self._holders.discard(turn)
        self._wake()

    def _admits(self, turn: Turn, place: SimpleQueue[None]) -> bool:
        with self._lock:
            is_alone = turn.is_alone or any(each.is_alone for each in tuple(self._holders))
            if self._waiting[0] is not place or (self._holders and is_alone):
                return False
            self._holders.add(turn)
            return True

    def _wake(self) -> None:
        for place in tuple(self._waiting):
            place.put(None)


_PROCESS = _Process()
_TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)

# A forked child has none of the threads that held a turn. Windows can't fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS.__init__)  # type: ignore[misc]


def is_exclusive() -> bool:
    """Whether the current turn is exclusive, here or in the thread that waits for this one."""
    turn = _TURN.get()
    return turn is not None and turn.is_alone and turn.is_held


@contextmanager
def exclusive() -> Iterator[None]:
    """Context: this thread alone may set process-wide switches, and must restore them.

    It does nothing within an exclusive turn.
    """
    with Turn(is_alone=True):
        yield


def stay_exclusive() -> None:
    """Make the current run exclusive until its end; does nothing outside of a turn."""
    turn = _TURN.get()
    if turn is not None and turn.is_held and not turn.is_alone:
        _PROCESS.give(turn)
        turn.is_alone = True
        _PROCESS.take(turn)
