"""Device type of a tensor, also in a dry run.

Dry-run tensors are on meta, which simulates a device that this machine may not have. Code that
depends on the device type calls `device_type`, so a dry run takes the same branches as a run. A dry
run computes identical repetitions of work once and multiplies its operation counts
(`everyframe.dry_run.executor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_SIMULATED: ContextVar[str] = ContextVar("simulated_device_type", default="meta")
_TIMES: ContextVar[float] = ContextVar("times", default=1.0)


def device_type(x: Tensor) -> str:
    """Torch's device type of `x`; for meta, the simulated type."""
    kind = x.device.type
    return _SIMULATED.get() if kind == "meta" else kind


def meta_device_type() -> str:
    """Device type that meta simulates; ``meta`` outside of a dry run."""
    return _SIMULATED.get()


@contextmanager
def simulate_device_type(kind: str) -> Iterator[None]:
    """Context: meta simulates a device of that type."""
    token = _SIMULATED.set(kind)
    try:
        yield
    finally:
        _SIMULATED.reset(token)


@contextmanager
def repeat_operations(times: float) -> Iterator[None]:
    """Context: each operation on meta counts as `times` operations."""
    token = _TIMES.set(_TIMES.get() * times)
    try:
        yield
    finally:
        _TIMES.reset(token)


def operation_repeats() -> float:
    """Number of operations that one operation on meta counts as."""
    return _TIMES.get()
