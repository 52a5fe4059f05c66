"""Stop a run from another thread than the one that consumes its events.

A generator that waits for its next event can't be closed from outside. Imports no torch.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection, Pipe

from everyframe.core.errors import RunStoppedError


class StopSwitch:
    """Switch that stops one run; its `connection` is readable once it is set."""

    def __init__(self) -> None:
        reader, self._writer = Pipe(duplex=False)
        assert isinstance(reader, Connection)
        self.connection = reader
        self._lock = threading.Lock()
        self._is_set = False

    def set(self) -> None:
        """Stop the run, now or when it begins; may be called from any thread, and again."""
        with self._lock:
            self._is_set = True
            self._writer.close()

    def check(self) -> None:
        """Raise `RunStoppedError` if it is set."""
        if self._is_set:
            raise RunStoppedError("the run was stopped; resume it to continue")
