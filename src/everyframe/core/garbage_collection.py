"""The garbage collector stands still while a process of our own begins.

Importing torch, transformers and diffusers makes some millions of objects that stay; looking
through them again and again takes a sixth of that time (`benchmarks/startup.py`). Only for
processes that are ours from end to end, a command's or a worker's: nobody else's is touched.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, nothing is looked for; afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
