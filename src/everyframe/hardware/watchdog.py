"""A time limit that a hang in a C library does not outlast, for a process that may end with it.

A thread of faulthandler's own counts the seconds, and needs no help of the interpreter's. Not here:
processes whose end somebody waits for (`isolated`).
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Within, this process ends by itself after so many seconds, with exit code 1."""
    faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
