"""Tells whoever watches this process that weights are being read, which may take long.

Not here: how they are read (`torch_file.py`), and who watches (`everyframe.engine.worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Told when a read begins (True) and when it has ended (False), in whichever thread.
Watcher = Callable[[bool], None]

_WATCHERS: list[Watcher] = []


def watch_reads(watcher: Watcher) -> None:
    """Have `watcher` told from now on; for a process that does nothing but one run."""
    _WATCHERS.append(watcher)


@contextmanager
def report_reading() -> Iterator[None]:
    """Within, weights are read: a tensor, or a component by a library that reads it whole."""
    for watcher in _WATCHERS:
        watcher(True)
    try:
        yield
    finally:
        for watcher in _WATCHERS:
            watcher(False)
