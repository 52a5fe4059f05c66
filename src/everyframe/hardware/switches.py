"""Torch's switches that hold for the whole process, and who may set them: one run at a time.

Kernels of attention, TF32, the width of sums: of each torch keeps one value for all threads. A run
that needs its own values sets them while it computes an event, alone; it puts them back before
anybody else computes. Runs that set nothing (a pipeline in memory) compute side by side. Whoever
waits is served in the order of coming, and holds nothing meanwhile, so nobody waits in a circle.
Not here: the switches themselves (`everyframe.ops.attention`,
`everyframe.precision.strict_float32`); what torch keeps for each thread (`thread_state.py`).
Threads that are not ours are not asked: their attention may run on another kernel while an event of
ours is computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue

#: Seconds after which a thread that waits looks up, so that an exception sent to it is raised.
_PATIENCE = 0.2


class Turn:
    """A run's turns at computing: entered for each event, left while the event is read.

    With `is_exclusive` nobody else's turn overlaps. Entered again by the same run, also in a thread
    that was started within with a copy of its context, it does nothing. Entered within another
    run's turn (from a hook of that run) it takes that one's place for the time.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        # For each time that it was entered: is it a part of another turn; which was there before,
        # and which of these has to be given back.
        self._before: list[tuple[bool, Turn | None, Turn | None]] = []

    @property
    def is_held(self) -> bool:
        """Whether it is this run's turn."""
        return _PROCESS.is_held(self)

    def __enter__(self) -> Turn:
        before = _TURN.get()
        held = before if before is not None and before.is_held else None
        # Where nobody can compute beside it all that is within is a part of it.
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
        """Within, it is nobody's turn; afterwards this run's again, unless an exception is raised.

        Whoever leaves by an exception may not wait for others.
        """
        was_held = self.is_held
        _PROCESS.give(self)
        yield
        if was_held:
            _PROCESS.take(self)


class _Process:
    """Who computes just now, and who waits.

    A turn is given back without a lock: that may happen while a forgotten generator is collected,
    at any place of a thread that has the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[SimpleQueue[None]] = []
        self._holders: set[Turn] = set()

    def is_held(self, turn: Turn) -> bool:
        return turn in self._holders

    def take(self, turn: Turn) -> None:
        """Wait until it can be this one's turn."""
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
        """It is over; nothing if it was not this one's."""
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

# A child has one thread, and none of those that held a turn here.
os.register_at_fork(after_in_child=_PROCESS.__init__)  # type: ignore[misc]


def is_exclusive() -> bool:
    """Whether it is the turn of a run that computes alone, here or in the thread that waits."""
    turn = _TURN.get()
    return turn is not None and turn.is_alone and turn.is_held


@contextmanager
def exclusive() -> Iterator[None]:
    """Within, this thread alone may set switches that hold for the process, if it puts them back.

    In the turn of a run that is alone it does nothing.
    """
    with Turn(is_alone=True):
        yield


def stay_exclusive() -> None:
    """From here on to its end the run whose turn it is computes alone; without one nothing."""
    turn = _TURN.get()
    if turn is not None and turn.is_held and not turn.is_alone:
        _PROCESS.give(turn)
        turn.is_alone = True
        _PROCESS.take(turn)
