"""Control groups and processor files, laid out in a folder as kernels lay them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from everyframe.hardware import cpu as cpu_module

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    cpu_module.sys.platform != "linux", reason="control groups are Linux's"
)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 4 cores with two threads each and 1000 MiB, 600 of them free."""
    monkeypatch.setattr(cpu_module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cpu_module, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cpu_module, "_CPUS", tmp_path / "cpus")
    monkeypatch.setattr(cpu_module, "_NODES", tmp_path / "nodes")
    monkeypatch.setattr(cpu_module.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu_module, "_system_memory", lambda: (1000 * MIB, 600 * MIB))
    monkeypatch.setattr(cpu_module, "_process_limits", lambda: ())
    write(tmp_path / "proc/cpuinfo", "model name\t: Chip 9000\nflags\t\t: sse amx_bf16 avx\n")
    for cpu in range(8):
        write(tmp_path / f"cpus/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups(system: Path) -> None:
    assert cpu_module.usable_memory() == (1000 * MIB, 600 * MIB)
    assert cpu_module.num_usable_cores() == 4


def test_name_and_instructions(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    facts = cpu_module.processor_facts()
    assert facts.name == "Chip 9000"
    assert facts.has_fast_bf16
    write(system / "proc/cpuinfo", "model name\t: Chip 9000\nflags\t\t: sse avx512f\n")
    assert not cpu_module.processor_facts().has_fast_bf16


def test_instructions_that_onednn_is_held_from_are_not_there(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_fp16"
    write(system / "proc/cpuinfo", f"flags\t\t: {flags}\n")
    for limit, left in (
        ("ALL", flags),
        ("avx512_core_amx", "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16"),
        ("AVX512_CORE_FP16", "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16"),
        ("AVX512_CORE_BF16", "avx2 avx512f avx512_vnni avx512_bf16"),
        ("AVX512_CORE", "avx2 avx512f"),
        ("AVX2", "avx2"),
    ):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert cpu_module.processor_flags() == set(left.split())
        facts = cpu_module.processor_facts()
        assert facts.has_fast_bf16 == ("bf16" in left)
        assert facts.has_fast_fp16 == ("fp16" in left)


def test_arm_spells_its_flags_otherwise(system: Path) -> None:
    write(system / "proc/cpuinfo", "Features\t: fp asimd svebf16 bf16\n")
    assert cpu_module.processor_facts().has_fast_bf16


def test_version_2_limits_of_the_group_and_of_the_one_around_it(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/pod/box\n")
    write(system / "cgroup/pod/box/memory.max", "max\n")
    write(system / "cgroup/pod/memory.max", f"{500 * MIB}\n")
    write(system / "cgroup/pod/memory.current", f"{200 * MIB}\n")
    write(system / "cgroup/pod/memory.stat", f"anon 1\ninactive_file {50 * MIB}\n")
    write(system / "cgroup/pod/box/cpu.max", "250000 100000\n")
    write(system / "cgroup/pod/cpu.max", "max 100000\n")
    assert cpu_module.usable_memory() == (500 * MIB, 350 * MIB)
    assert cpu_module.num_usable_cores() == 2


def test_version_1_limits(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n")
    write(system / "cgroup/memory/box/memory.limit_in_bytes", str(400 * MIB))
    write(system / "cgroup/memory/box/memory.usage_in_bytes", str(300 * MIB))
    write(system / "cgroup/memory/box/memory.stat", f"inactive_file 7\ntotal_inactive_file {MIB}\n")
    write(system / "cgroup/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    write(system / "cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "50000")
    write(system / "cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    assert cpu_module.usable_memory() == (400 * MIB, 101 * MIB)
    assert cpu_module.num_usable_cores() == 1


def test_a_container_whose_path_is_the_hosts(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/docker/0123abcd\n")
    write(system / "cgroup/memory.max", str(300 * MIB))
    write(system / "cgroup/memory.current", str(400 * MIB))
    assert cpu_module.usable_memory() == (300 * MIB, 0)


def test_affinity_counts(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module.os, "sched_getaffinity", lambda pid: {1, 5, 2})
    assert cpu_module.num_usable_cores() == 2


def test_a_group_that_is_slowed_down_above_its_limit(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/\n")
    write(system / "cgroup/memory.max", f"{500 * MIB}")
    write(system / "cgroup/memory.high", f"{400 * MIB}")
    write(system / "cgroup/memory.current", f"{100 * MIB}")
    assert cpu_module.usable_memory() == (400 * MIB, 300 * MIB)
    write(system / "cgroup/memory.high", "max")
    assert cpu_module.usable_memory() == (500 * MIB, 400 * MIB)


@pytest.mark.parametrize(
    ("allowed", "total", "available"),
    [("0-3", 1000, 600), ("1", 250, 110), ("1-2", 500, 220), ("7", 1000, 600), ("", 1000, 600)],
)
def test_memory_of_other_numa_nodes_is_out_of_reach_in_a_cpuset(
    allowed: str, total: int, available: int, system: Path
) -> None:
    write(
        system / "proc/self/status", f"Name:\tx\nMems_allowed:\t0f\nMems_allowed_list:\t{allowed}\n"
    )
    write(system / "nodes/has_memory", "0-3\n")
    for number in range(4):
        sizes = {"MemTotal": 250, "MemFree": 100, "Inactive": 70, "Inactive(file)": 10}
        lines = [f"Node {number} {name}:  {size * 1024} kB\n" for name, size in sizes.items()]
        write(system / f"nodes/node{number}/meminfo", "".join(lines))
    assert cpu_module.usable_memory() == (total * MIB, available * MIB)


@pytest.mark.parametrize("option", ["v", "d"])
def test_limits_of_the_process_count(option: str) -> None:
    """In a shell of its own: a limit is not raised again."""
    code = "from everyframe.hardware.cpu import usable_memory; print(*usable_memory())"
    done = subprocess.run(
        ["bash", "-c", f'ulimit -{option} 800000; "$0" -c "$1"', sys.executable, code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    total, available = map(int, done.stdout.split())
    assert total == 800_000 * 1024
    assert 0 < available < total


@pytest.mark.parametrize(
    ("usable", "percent", "is_busy"),
    [
        ({0, 1}, [0.0, 0.0], False),
        ({0, 1}, [10.0, 20.0], False),
        ({0, 1}, [0.0, 100.0], True),
        ({0, 1}, [50.0, 50.0], True),
        (set(range(64)), [90.0] * 64, False),
        ({5, 6}, [100.0] * 6 + [0.0] * 2, True),
        ({6, 7}, [100.0] * 5 + [0.0] * 3, False),
        ({17, 45}, [0.0, 0.0], False),
        ({17, 45}, [100.0, 0.0], True),
    ],
)
def test_others_that_leave_less_than_a_core_a_thread(
    usable: set[int], percent: list[float], is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may use two cores, of all or of some; a container numbers its own."""
    monkeypatch.setattr(cpu_module, "num_usable_cores", lambda: 2)
    monkeypatch.setattr(cpu_module, "_usable_cpus", lambda: usable)
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: percent)
    assert cpu_module.is_busy() == is_busy


def test_a_sandbox_that_hides_the_use_of_the_cpu_counts_as_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(seconds: float, percpu: bool) -> list[float]:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", refuse)
    assert not cpu_module.is_busy()


@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to a core")
def test_busy_processes_are_seen() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = (
        "import os, subprocess, sys\n"
        f"os.sched_setaffinity(0, [{cpu}])\n"
        "from everyframe.hardware.cpu import is_busy\n"
        'other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\\nwhile True: pass"],\n'
        "                         stdout=subprocess.PIPE)\n"
        "other.stdout.readline()\n"
        "print(is_busy())\n"
        "other.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
