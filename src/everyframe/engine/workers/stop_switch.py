"""Stop a run from another thread than the one that consumes its events.

A generator that waits for its next event can't be closed from outside. Imports no torch.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection, Pipe

from everyframe.core.errors import RunStoppedError


class StopSwitch:
    """Switch that stops one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._ends: tuple[Connection, Connection] | None = None

    @property
    def connection(self) -> Connection:
        """Readable once it is set.

        Made when the run first waits: the system may have no files left for it, an `OSError` of the
        run.
        """
        with self._lock:
            if self._ends is None:
                reader, writer = Pipe(duplex=False)
                assert isinstance(reader, Connection)
                assert isinstance(writer, Connection)
                if self._is_set:
                    writer.close()
                self._ends = reader, writer
            return self._ends[0]

    def set(self) -> None:
        """Stop the run, now or when it begins; may be called from any thread, and again."""
        with self._lock:
            self._is_set = True
            if self._ends is not None:
                self._ends[1].close()

    def check(self) -> None:
        """Raise `RunStoppedError` if it is set."""
        if self._is_set:
            raise RunStoppedError("the run was stopped")
