"""Device type of a tensor, also in a dry run.

Dry-run tensors are on meta, which stands for a device that this machine may not have. Code that
computes differently by device type asks here, so a dry run takes the same branches as a run. Work
that repeats identically is computed once in a dry run and counted as often as it would happen
(`everyframe.dry_run.executor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="meta")
_TIMES: ContextVar[float] = ContextVar("times", default=1.0)


def kind_of(x: Tensor) -> str:
    """Torch's device type of `x`; for meta, the type that meta stands for."""
    kind = x.device.type
    return _STANDS_FOR.get() if kind == "meta" else kind


def standing_kind() -> str:
    """Device type that meta stands for; ``meta`` outside of a dry run."""
    return _STANDS_FOR.get()


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Context: meta stands for a device of that type."""
    token = _STANDS_FOR.set(kind)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


@contextmanager
def counted(times: float) -> Iterator[None]:
    """Context: operations on meta count `times` times."""
    token = _TIMES.set(_TIMES.get() * times)
    try:
        yield
    finally:
        _TIMES.reset(token)


def times() -> float:
    """Current multiplier of operations on meta."""
    return _TIMES.get()
