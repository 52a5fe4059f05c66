"""Keep the garbage collector from scanning the libraries that one of our own processes imports.

Importing torch, transformers and diffusers makes some millions of permanent objects. Scanning them
repeatedly takes a sixth of the import time (`benchmarks/startup.py`), and 0.3 s each time later.
Only command and worker processes use this; a caller's process is left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context: pause garbage collection, then restore its previous state."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def resume_collector() -> None:
    """Resume garbage collection if it is off, without what the process has imported by now.

    To be called before weights are loaded: a module of theirs in a reference cycle, which stays as
    it is among the imports, would never be freed.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
