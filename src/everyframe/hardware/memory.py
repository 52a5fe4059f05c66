"""The most memory that this process has held on a device so far, whether it was too much, and what
torch keeps of it.

Not here: forecasts (`everyframe.core.bytes`) and limits (`facts.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from everyframe.core.facts import DeviceFacts

_Result = TypeVar("_Result")

#: Above this share of a device's memory, memory may be what is wrong.
_NEAR = 0.95


def peak_bytes(device: DeviceFacts) -> int | None:
    """Bytes; None where the system doesn't tell."""
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device.index))
    if device.kind != "cpu" or sys.platform == "win32":
        return None
    import resource

    # In bytes on macOS, in kilobytes elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is an allocator that found no memory.

    torch has a class of its own for accelerators only; elsewhere it says so in words, and for
    what cuBLAS and cuDNN find no room for in the names of their codes.
    """
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


@dataclass(frozen=True)
class OutOfMemory:
    """What an allocator `said` that found no memory."""

    said: str


def catch_out_of_memory(compute: Callable[[], _Result]) -> _Result | OutOfMemory:
    """The result of `compute`, or what was said where memory ran out.

    Told and not raised, so that nothing holds what the failed call had made.
    """
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return OutOfMemory(str(error).partition("\n")[0])


def empty_cache() -> None:
    """Have torch return to accelerators what it keeps of their memory for later."""
    import torch

    for accelerator in (torch.cuda, torch.mps):
        if accelerator.is_available():
            accelerator.empty_cache()


def describe_memory_pressure(device: DeviceFacts) -> str:
    """Whether memory was near its limit, in a clause; empty where the system doesn't tell."""
    peak = peak_bytes(device)
    if peak is None or not device.memory:
        return ""
    is_near = peak > _NEAR * device.memory
    verdict = "near the limit" if is_near else "not memory"
    return f"peak {peak / 1e9:.1f} of {device.memory / 1e9:.1f} GB: {verdict}"
