"""How many bytes of tensors are alive, now and at most, while operations run.

A storage counts from the operation that made it until nobody holds it any more; views share one.
Works on tensors without numbers as on real ones. What was there before (weights) is not counted,
nor is what kernels take inside of themselves, unless they are told by `workspace`.
Read next: `everyframe.precision.rehearse`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class LiveBytes:
    """`now` and `peak` in bytes, and `peak_at`, what was running then."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.peak_at = ""
        self._seen: dict[int, weakref.ref[Any]] = {}

    def known(self, tensors: Iterable[Tensor]) -> None:
        """These were there before: not counted, unless they were made under our eyes."""
        for tensor in tensors:
            self._add(tensor, 0)

    def made(self, tensors: Iterable[Tensor], place: str) -> None:
        """These came out of an operation at `place`; views of what is known count nothing."""
        for tensor in tensors:
            self._add(tensor, tensor.untyped_storage().nbytes())
        self._at_most(self.now, place)

    def workspace(self, num_bytes: int, place: str) -> None:
        """A kernel at `place` held so many bytes beside its operands for a moment."""
        self._at_most(self.now + num_bytes, place)

    def take_peak(self) -> tuple[int, str]:
        """`peak` and `peak_at` until now; from here on they count anew."""
        taken = self.peak, self.peak_at
        self.peak, self.peak_at = self.now, ""
        return taken

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        self.now += size

        def gone(_: object) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)

    def _at_most(self, num_bytes: int, place: str) -> None:
        if num_bytes > self.peak:
            self.peak, self.peak_at = num_bytes, place
