"""The line about memory beside a fault."""

from __future__ import annotations

import os
import platform
import sys

import psutil
import pytest
import torch

from everyframe.core.facts import DeviceFacts
from everyframe.hardware import memory
from everyframe.hardware.isolation import run_isolated
from everyframe.hardware.memory import describe_memory_pressure, is_out_of_memory, peak_bytes

#: What a first exchange on a full card gave with NCCL 2.28.9, and what follows it.
FULL_NCCL = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows doesn't tell")
def test_the_peak_is_that_of_this_process() -> None:
    peak = peak_bytes(DeviceFacts("cpu", "cpu", None, 1, 1))
    assert peak is not None
    # Python with torch holds some hundred megabytes; a wrong unit would be off by a thousand.
    assert 2e7 < peak < 2e10
    assert "not memory" in describe_memory_pressure(DeviceFacts("cpu", "cpu", None, 2 * peak, 0))
    assert "near the limit" in describe_memory_pressure(DeviceFacts("cpu", "cpu", None, peak, 0))


def test_nothing_is_reported_where_nothing_is_known() -> None:
    assert describe_memory_pressure(DeviceFacts("gpu", "mps", 0, 10**9, 10**9)) == ""


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError(f"{FULL_NCCL}Failed to CUDA calloc async 24 bytes"), True),
        (RuntimeError(f"{FULL_NCCL}Cuda failure 'out of memory'"), True),
        (RuntimeError(f"{FULL_NCCL}Cuda failure 'an illegal memory access'"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it


@pytest.mark.parametrize("status", ["CUDNN_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_NOT_INITIALIZED"])
@pytest.mark.parametrize(
    ("free", "is_it"), [(100 * 10**6, True), (600 * 10**6, False), (None, False)]
)
def test_a_library_that_fails_inside_lacked_memory_on_a_full_card_alone(
    monkeypatch: pytest.MonkeyPatch, status: str, free: int | None, is_it: bool
) -> None:
    def mem_get_info() -> tuple[int, int]:
        if free is None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return free, 8 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert is_out_of_memory(RuntimeError(f"cuDNN error: {status}")) == is_it


def test_a_library_that_fails_inside_without_a_card_is_no_lack_of_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a card")
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))


def resident_after_freeing(is_kept: bool) -> tuple[int, int]:
    """Bytes more than before that a process has once it has freed 256 MB, then after a return."""
    for name in memory._TUNED:
        os.environ.pop(name, None)
    process = psutil.Process()
    memory.keep_freed_memory(is_kept)
    before = process.memory_info().rss
    blocks = [torch.ones(1 << 24) for _ in range(4)]
    assert process.memory_info().rss - before > 250e6
    del blocks
    freed = process.memory_info().rss - before
    memory.empty_cache()
    return freed, process.memory_info().rss - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc")
def test_freed_memory_is_kept_until_it_is_returned() -> None:
    kept, returned = run_isolated(resident_after_freeing, True, seconds=60).value
    assert kept > 250e6
    assert returned < 20e6
    assert run_isolated(resident_after_freeing, False, seconds=60).value[0] < 20e6


@pytest.mark.parametrize("name", memory._TUNED)
def test_what_a_user_has_tuned_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in memory._TUNED:
        monkeypatch.delenv(each, raising=False)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(memory, "_malloc", lambda _, *arguments: asked.append(arguments))
    memory.keep_freed_memory(True)
    assert asked == [*memory._KEPT.items()]
    monkeypatch.setenv(name, "1")
    memory.keep_freed_memory(False)
    assert len(asked) == len(memory._KEPT)
