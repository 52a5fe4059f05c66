"""How many threads torch computes with on the CPU, for the time of a block.

Results depend on their number in the last bits. Not here: how many a plan has
(`everyframe.planning.resolve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """So many threads within, in this thread, and as many as before afterwards.

    A thread that computes for the first time meanwhile begins with that number as well, so nothing
    is set where it holds already.
    """
    import torch

    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
