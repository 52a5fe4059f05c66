"""Report reads of weights, which may take long, to a watcher of this process.

`torch_file.py` reports; `everyframe.engine.workers.worker` watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called when a read begins (True) and ends (False), in any thread.
Watcher = Callable[[bool], None]

_WATCHERS: list[Watcher] = []


def watch_reads(watcher: Watcher) -> None:
    """Register `watcher`; for a process that runs nothing but one run."""
    _WATCHERS.append(watcher)


@contextmanager
def report_reading() -> Iterator[None]:
    """Context: weights are being read, one tensor, or a whole component by a library."""
    for watcher in _WATCHERS:
        watcher(True)
    try:
        yield
    finally:
        for watcher in _WATCHERS:
            watcher(False)
