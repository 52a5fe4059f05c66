"""Exchanges that go on while a rank computes: what is on its way from it, and to it.

Read next: `team`, which begins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


class PendingSend:
    """What is on its way to another rank; it is kept alive until `wait` returns."""

    def __init__(self, works: Sequence[Any], told: AbstractContextManager[None]) -> None:
        self._works, self._told = list(works), told

    def wait(self) -> None:
        """Until it was fetched."""
        with self._told:
            for work in self._works:
                work.wait()
        self._works = []


class PendingReceive:
    """What is on its way to this rank; what it sends meanwhile is kept alive until `wait`."""

    def __init__(
        self,
        out: Tensor,
        given: Tensor | None = None,
        work: Any = None,
        told: AbstractContextManager[None] | None = None,
    ) -> None:
        self._out, self._given, self._work, self._told = out, given, work, told

    def wait(self) -> Tensor:
        """What came, once all of it is there."""
        if self._told is not None:
            with self._told:
                self._work.wait()
        self._given = self._work = self._told = None
        return self._out
