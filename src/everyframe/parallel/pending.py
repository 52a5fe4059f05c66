"""Handles of asynchronous sends and receives, which `communicator` starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


class PendingSend:
    """Data in transfer to other ranks, referenced until `wait` returns."""

    def __init__(self, works: Sequence[Any], waiting: AbstractContextManager[None]) -> None:
        self._works, self._waiting = list(works), waiting

    def wait(self) -> None:
        """Block until the data is sent."""
        with self._waiting:
            for work in self._works:
                work.wait()
        self._works = []


class PendingReceive:
    """Data in transfer to this rank; the tensor that it sends itself is referenced until `wait`."""

    def __init__(
        self,
        out: Tensor,
        given: Tensor | None = None,
        work: Any = None,
        waiting: AbstractContextManager[None] | None = None,
    ) -> None:
        self._out, self._given, self._work, self._waiting = out, given, work, waiting

    def wait(self) -> Tensor:
        """Block until all data has arrived, and return it."""
        if self._waiting is not None:
            with self._waiting:
                self._work.wait()
        self._given = self._work = self._waiting = None
        return self._out
