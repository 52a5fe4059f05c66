"""CPU facts: name, instruction sets, and the cores and memory that this process may use.

A container sees all cores and memory of its host but may use only some of them, so CPU affinity,
control group limits (versions 1 and 2), its NUMA nodes and limits of the process are included.
Throughput is in `everyframe.hardware.throughput`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from everyframe.core.facts import DeviceFacts

#: CPU flags, in Linux's spelling, of instructions that multiply bf16 and fp16 matrices.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})

#: Variables that restrict oneDNN, which computes torch's products on a CPU, to older instructions.
#: Each value excludes its flags and those of all values before it; other values exclude nothing.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_LEAVES_OUT = (
    ("AVX512_CORE_AMX", ("amx_fp16",)),
    ("AVX512_CORE_FP16", ("amx_tile", "amx_int8", "amx_bf16")),
    ("AVX512_CORE_BF16", ("avx512_fp16",)),
    ("AVX512_CORE_VNNI", ("avx512_bf16",)),
    ("AVX512_CORE", ("avx512_vnni",)),
    ("AVX2_VNNI_2", ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")),
    ("AVX2_VNNI", ()),
    ("AVX2", ("avx_vnni",)),
    ("AVX", ("avx2", "fma")),
    ("SSE41", ("avx",)),
)

#: Limits above this mean "no limit" in version 1.
_NO_LIMIT = 1 << 60

#: Seconds of a look at how busy the CPU is, and the share of a core that may be missing.
_SAMPLE, _SPARE = 0.05, 0.5

#: `omp_pause_soft`: settings stay.
_SOFTLY = 1

#: Held while a number of threads is set, also while a forgotten stream is collected.
_SETTING = threading.RLock()

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


def processor_facts() -> DeviceFacts:
    """The CPU as a device. `memory` is the most that this process may use, in bytes."""
    total, available = usable_memory()
    return DeviceFacts(
        name=processor_name(),
        kind="cpu",
        index=None,
        memory=total,
        free_memory=available,
        has_fast_bf16=bool(processor_flags() & BF16_FLAGS),
        has_fast_fp16=bool(processor_flags() & FP16_FLAGS),
    )


def processor_name() -> str:
    """Product name of the CPU, or the architecture if the system does not report one."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "CPU"


def processor_flags() -> frozenset[str]:
    """Usable instruction sets, by Linux's names; on macOS only ``bf16`` is queried.

    Instruction sets that ``ONEDNN_MAX_CPU_ISA`` forbids are excluded.
    """
    if sys.platform == "darwin":
        return frozenset({"bf16"} if _sysctl("hw.optional.arm.FEAT_BF16") == "1" else ())
    there = frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return there - _forbidden()


def _forbidden() -> frozenset[str]:
    limit = next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "").upper()
    values = [value for value, _ in _LEAVES_OUT]
    reached = _LEAVES_OUT[: values.index(limit) + 1] if limit in values else ()
    return frozenset(flag for _, flags in reached for flag in flags)


def num_usable_cores() -> int:
    """Physical cores that this process may use, at least 1.

    Two hardware threads of one core share its multipliers, so they count once.
    """
    cores = {_core_of(cpu) for cpu in _usable_cpus()}
    quota = min(_quotas(), default=float("inf"))
    return max(1, int(min(len(cores), quota)))


def is_busy() -> bool:
    """Whether other programs leave less than a core for each of our threads; takes 50 ms.

    Those that share a control group's quota with us are not seen.
    """
    try:
        shares = psutil.cpu_percent(_SAMPLE, percpu=True)
    except OSError:  # a sandbox hides /proc/stat
        return False
    cpus = _usable_cpus()
    if max(cpus) < len(shares):  # else a container numbers its own from 0
        shares = [shares[cpu] for cpu in cpus]
    return sum(1 - share / 100 for share in shares) < num_usable_cores() - _SPARE


def usable_memory() -> tuple[int, int]:
    """Bytes that this process may use at most, and bytes that are free now."""
    total, available = _system_memory()
    for limit, used in (*_memory_limits(), *_node_limits(), *_process_limits()):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _system_memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, use without reclaimable memory) of this control group and its ancestors."""
    for folder in _groups("memory"):
        # Above memory.high nothing is killed, and all are slowed down until they stand still.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        numbers = [_number(_read(folder / name)) for name in names]
        limit = min((each for each in numbers if each is not None), default=_NO_LIMIT)
        if limit >= _NO_LIMIT:
            continue
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        stat = _read(folder / "memory.stat")
        cache = re.search(r"^total_inactive_file (\d+)", stat, re.M)
        cache = cache or re.search(r"^inactive_file (\d+)", stat, re.M)
        yield limit, max(0, (_number(used) or 0) - (int(cache[1]) if cache else 0))


def _node_limits() -> Iterator[tuple[int, int]]:
    """(memory, use without reclaimable memory) of its NUMA nodes, if a cpuset leaves only some."""
    status = re.search(r"^Mems_allowed_list:(.*)$", _read(_PROC / "self" / "status"), re.M)
    there = _numbers(_read(_NODES / "has_memory"))
    allowed = there & _numbers(status[1] if status else "")
    if not allowed or allowed == there:
        return
    texts = [_read(_NODES / f"node{number}" / "meminfo") for number in sorted(allowed)]
    total, free, cache = (
        sum(
            int(size) * 1024 for text in texts for size in re.findall(rf" {name}:\s*(\d+) kB", text)
        )
        for name in ("MemTotal", "MemFree", r"Inactive\(file\)")
    )
    if total:
        yield total, total - free - cache


def _process_limits() -> Iterator[tuple[int, int]]:
    """(limit, use) of ``ulimit -v`` and ``ulimit -d``, which batch systems of clusters set."""
    if sys.platform != "linux":
        return
    import resource

    used = psutil.Process().memory_info()
    for kind, use in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, used.data)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit, use


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quotas() -> Iterator[float]:
    """CPU quota in cores of each control group around this process."""
    for folder in _groups("cpu"):
        pair = _read(folder / "cpu.max").split()
        if not pair:
            pair = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        quota, period = (_number(part) for part in pair)
        if quota is not None and quota > 0 and period:
            yield quota / period


def _groups(controller: str) -> Iterator[Path]:
    """Control group folders of this process, from its own up to the root."""
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controllers
            root = root if root.is_dir() else _CGROUP / controller
        else:
            continue
        # Inside a container the path may be the host's; only the root exists then.
        own = root / path.lstrip("/")
        while own != root and root in own.parents:
            if own.is_dir():
                yield own
            own = own.parent
        yield root


def _core_of(cpu: int) -> str:
    siblings = _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return siblings or str(cpu)


def _cpuinfo(key: str) -> str:
    found = re.search(rf"^{key}\s*:\s*(.*)$", _read(_PROC / "cpuinfo"), re.M)
    return found[1].strip() if found else ""


def _numbers(text: str) -> set[int]:
    """The numbers of a kernel's list, such as ``0-3,8``."""
    pairs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {n for first, last in pairs for n in range(int(first), int(last or first) + 1)}


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _read(path: Path) -> str:
    """Text of a kernel file; empty if it is missing or unreadable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    return output_of(["sysctl", "-n", name])


def output_of(command: list[str]) -> str:
    """What a command prints; empty if there is none, it fails, or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def end_idle_threads() -> None:
    """End the CPU threads that wait to compute for this one, before another thread computes.

    torch has been imported.

    GNU's OpenMP keeps such threads for each thread that has computed. While a process has more than
    the machine has CPUs, they sleep between any two operations: small ones take twice as long.
    Ending and starting one takes some 0.1 ms. Other runtimes of OpenMP ignore it, or lack it.
    """
    pause = _openmp_pause()
    if pause is not None:
        pause(_SOFTLY)


@cache
def _openmp_pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the OpenMP that torch has loaded; looking it up takes 30 us."""
    import ctypes

    # Linux finds it among the libraries that torch loads for all.
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return found


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Context: use `number` CPU threads in this thread, then restore the earlier number.

    Other threads keep theirs, also those that compute for the first time meanwhile. Nothing is set
    if the number is already right.
    """
    import torch

    before = torch.get_num_threads()
    if before == number:
        yield
        return
    try:
        _set_threads(number)
        yield
    finally:
        _set_threads(before)


def _set_threads(number: int) -> None:
    """Set the number of CPU threads for this thread.

    torch also makes it the number of all threads that have not computed yet, so a new thread reads
    that number before, and sets it again at once.
    """
    import torch

    if sys.is_finalizing():  # no thread can be started, and none will compute
        torch.set_num_threads(number)
        return
    with _SETTING, ThreadPoolExecutor(1, "everyframe-threads") as fresh:
        default = fresh.submit(torch.get_num_threads).result()
        try:
            torch.set_num_threads(number)
        finally:
            fresh.submit(torch.set_num_threads, default).result()
