"""Peak memory of this process on a device, out-of-memory detection, and memory kept for reuse.

Memory forecasts are in `everyframe.core.bytes`, limits in `facts.py`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from everyframe.core.facts import DeviceFacts

_Result = TypeVar("_Result")

#: Above this share of a device's memory, memory may be the cause of a failure.
_NEAR = 0.95

#: Words of errors that say that memory ran out; the last ones are NCCL's, of its own buffers.
_WORDS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED", "Failed to CUDA malloc",
          "Failed to CUDA calloc", "Failed to CUDA host alloc")  # fmt: skip

#: Status codes of cuBLAS, cuDNN and cuSOLVER for whatever failed inside of them.
_INTERNAL = ("STATUS_INTERNAL_ERROR", "STATUS_NOT_INITIALIZED")

#: Free bytes below which such a status is put down to memory. The libraries load kernels into it
#: when they are first needed, cuDNN 500 MB at once (pytorch#81620).
_LIBRARY_BYTES = 500 * 10**6

#: Numbers of glibc's `mallopt`: free bytes at the heap's end above which they return to the system;
#: bytes from which a block is a mapping of its own, which returns at once; how many of them may be.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
#: What keeps freed memory, and what glibc has by itself once it has freed large blocks.
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_RETURNED = {_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: 1 << 25, _TRIM_THRESHOLD: 1 << 26}
#: Variables by which users tune that themselves.
_TUNED = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def peak_bytes(device: DeviceFacts) -> int | None:
    """Peak memory of this process on the device in bytes; None if the system reports none."""
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
    """Whether the error is an out-of-memory error.

    torch has an error class for accelerators only. Elsewhere the text is matched, and for cuBLAS
    and cuDNN the names of their status codes. A status that says no reason counts on a full card.
    """
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(each in text for each in _WORDS):
        return True
    return any(each in text for each in _INTERNAL) and _is_card_full()


def _is_card_full() -> bool:
    """Whether this thread's card has too little free memory for a library's kernels."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError:
        return False  # the card is lost, which is another error
    return free < _LIBRARY_BYTES


@dataclass(frozen=True)
class OutOfMemory:
    """Out-of-memory message of an allocator, in `message`."""

    message: str


def out_of_memory(error: BaseException) -> OutOfMemory:
    """The message of an out-of-memory error; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    return OutOfMemory(str(error).partition("\n")[0])


def catch_out_of_memory(compute: Callable[[], _Result]) -> _Result | OutOfMemory:
    """Result of `compute`, or `OutOfMemory` if memory ran out.

    Returned and not raised, because a traceback would keep the failed call's tensors alive.
    """
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        return out_of_memory(error)


def keep_freed_memory(is_kept: bool) -> None:
    """Have this process keep the host memory that it frees, or return it as by default.

    The system zeroes each page that it gives, so a tensor in kept memory costs less: a step of
    Open-Sora in bfloat16 takes 6 to 10 % less time on one core. Freed blocks lie in one heap, whose
    gaps can raise the peak; `empty_cache` returns what is free. Nothing happens where malloc is not
    glibc's, or where the user has tuned it.
    """
    if not any(os.environ.get(name) for name in _TUNED):
        for number, value in (_KEPT if is_kept else _RETURNED).items():
            _malloc("mallopt", number, value)


def _malloc(function: str, *arguments: int) -> None:
    """Call a function that only glibc's malloc has."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), function, lambda *_: 0)(*arguments)


def empty_cache() -> None:
    """Return memory that is free and kept for reuse: of accelerators by torch, of the host."""
    import torch

    _malloc("malloc_trim", 0)
    for accelerator in (torch.cuda, torch.mps):
        if accelerator.is_available():
            accelerator.empty_cache()


def describe_memory_pressure(device: DeviceFacts) -> str:
    """Clause that says whether memory was near its limit; empty if the system reports none."""
    peak = peak_bytes(device)
    if peak is None or not device.memory:
        return ""
    is_near = peak > _NEAR * device.memory
    verdict = "near the limit" if is_near else "not memory"
    return f"peak {peak / 1e9:.1f} of {device.memory / 1e9:.1f} GB: {verdict}"
