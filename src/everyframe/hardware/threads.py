"""How many threads torch computes with on the CPU, for the time of a block.

Results depend on their number in the last bits. Not here: how many a plan has
(`everyframe.planning.resolve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """So many threads within, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
