"""What ranks that check the same results agree on, so that all of them make the same repairs.

A fault may show on one rank only: its memory or a kernel of its device is wrong. Each rank replays
the call alone, and all go by the first rank that finds a fault. Otherwise one would send tensors of
another dtype than the others expect, or call its modules more often than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from everyframe.numerics.fault import Fault
from everyframe.numerics.fault_locator import Located
from everyframe.numerics.tensor_stats import Range
from everyframe.parallel.communicator import ONE, Communicator
from everyframe.precision.dtypes import dtype_name

UnshardedCall = Callable[[], AbstractContextManager[None]]
"""Makes a context in which this rank computes a component without communication."""

_WHAT = "ranks compare their results"


class RankAgreement:
    """The ranks `group` that have the same results; `unsharded` where they compute them together.

    Attributes:
        is_unsharded: whether this rank computes alone for now what they compute together.
        culprit: the rank that alone had the last located fault, in words; empty if all had it.
    """

    def __init__(
        self, group: Communicator = ONE.video_group, unsharded: UnshardedCall | None = None
    ) -> None:
        self._group, self._unsharded = group, unsharded
        self.is_unsharded, self.culprit = False, ""

    @property
    def is_shared(self) -> bool:
        """Whether the ranks compute one result together."""
        return self._unsharded is not None

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context: run the components unsharded on this rank (no communication)."""
        if self._unsharded is None:
            yield
            return
        with self._unsharded():
            self.is_unsharded = True
            try:
                yield
            finally:
                self.is_unsharded = False

    def are_finite(self, seen: Range) -> bool:
        """Whether the result whose range is `seen` on this rank is finite on every rank."""
        if self._group.size == 1:
            return seen.is_finite
        own = torch.tensor([seen.is_finite], device="cpu")
        return bool(self._group.gather(own, [1] * self._group.size, _WHAT).all())

    def located(self, own: Located) -> Located:
        """What the first rank that has located something has; `own` if none has.

        A rank whose weights are not finite comes first: others see what its weights made.
        """
        if self._group.size == 1:
            return own
        error = "" if own.error is None else f"{type(own.error).__name__}: {own.error}"
        mine = ([_plain(each) for each in own.faults], error)
        everywhere = enumerate(self._group.all_gather_object(mine, _WHAT))
        found = [(rank, faults, text) for rank, (faults, text) in everywhere if faults or text]
        if not found:
            return own
        rank, faults, text = min(found, key=lambda one: not _has_weights(one[1]))
        self.culprit = f", on rank {rank} alone" if len(found) == 1 else ""
        if rank == self._group.rank:
            return own
        raised = RuntimeError(f"on rank {rank}: {text}") if text else None
        return Located(tuple(map(_fault, faults)), error=raised)

    def faults(self, own: Sequence[Fault]) -> Sequence[Fault]:
        """The same of faults alone."""
        return self.located(Located(tuple(own))).faults


def _has_weights(faults: Sequence[dict[str, Any]]) -> bool:
    return any(each["cause"] == "weights" for each in faults)


def _plain(fault: Fault) -> dict[str, Any]:
    return {**asdict(fault), "dtype": dtype_name(fault.dtype)}


def _fault(data: dict[str, Any]) -> Fault:
    ranges = {name: data[name] and Range(**data[name]) for name in ("given", "made", "wide")}
    return Fault(**{**data, **ranges, "dtype": getattr(torch, data["dtype"])})
