"""``make test-isa`` tries what the CPU has, and says so when a run fails."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from everyframe.hardware import cpu
from helpers import fake_cpus, instruction_sets


def names(cpu: str, *given: str) -> list[str]:
    return [
        each.name
        for each in instruction_sets.settings(frozenset(fake_cpus.FLAGS[cpu].split()), given)
    ]


def test_what_a_cpu_lacks_is_not_tried() -> None:
    assert names("avx2")[:4] == [
        "ONEDNN_MAX_CPU_ISA=AVX2", "ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2",
        "all that the CPU has",
    ]  # fmt: skip
    added = set(names("amx")) - set(names("avx2"))
    assert added == {"ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"}


def test_each_has_a_process_and_one_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "processor_flags", lambda: frozenset({"sse2", "avx2"}))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    seen: list[tuple[Any, list[str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.append((env.get("ONEDNN_MAX_CPU_ISA"), command[3:]))
        return subprocess.CompletedProcess(command, int(env.get("ATEN_CPU_CAPABILITY") == "avx2"))

    monkeypatch.setattr(instruction_sets.subprocess, "run", run)
    assert instruction_sets.main(["-x", "tests/ops"]) == 1
    assert seen[0] == ("AVX2", ["-x", "tests/ops"])
    assert seen[1:4] == [(None, ["-x", "tests/ops"])] * 3
    assert seen[4] == (None, ["--cpu", "avx2", "-x", "tests/ops"])
    lines = capsys.readouterr().out.splitlines()[-7:]
    assert [line.split()[-3] for line in lines].count("(1)") == 1
    assert sum("passed" in line for line in lines) == len(seen) - 1
