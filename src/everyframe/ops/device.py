"""Which kind of device a tensor is on, in a dry run as well.

There it is on meta, which stands for a device that need not be here; what is computed in one way on
a CPU and in another elsewhere asks here, so that a dry run sees what a run does. What is done many
times alike is done once there, and told to count as often. Not here: what is done about it.
Read next: `everyframe.dry_run.executor`, `families/svd/layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="meta")
_TIMES: ContextVar[float] = ContextVar("times", default=1.0)


def kind_of(x: Tensor) -> str:
    """Torch's device type of where `x` is; on meta, of the device that it stands for."""
    kind = x.device.type
    return _STANDS_FOR.get() if kind == "meta" else kind


def standing_kind() -> str:
    """What meta stands for, by torch's device type; ``meta`` outside of a dry run."""
    return _STANDS_FOR.get()


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Within, meta stands for a device of that kind."""
    token = _STANDS_FOR.set(kind)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


@contextmanager
def counted(times: float) -> Iterator[None]:
    """Within, what is computed on meta counts as if it were done so many times, one by one."""
    token = _TIMES.set(_TIMES.get() * times)
    try:
        yield
    finally:
        _TIMES.reset(token)


def times() -> float:
    """How often what is computed now on meta counts."""
    return _TIMES.get()
