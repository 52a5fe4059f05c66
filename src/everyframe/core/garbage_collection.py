"""Pause the garbage collector while one of our own processes imports its libraries.

Importing torch, transformers and diffusers makes some millions of permanent objects. Scanning them
repeatedly takes a sixth of the import time (`benchmarks/startup.py`). Only command and worker
processes use this; a caller's process is left alone.
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
