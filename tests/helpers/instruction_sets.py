"""Run the tests once for each instruction set of this CPU: ``make test-isa``.

On a CPU oneDNN computes matrix products and convolutions, torch's own kernels the rest. An
environment variable limits each to older instructions, once per process. After that, plans are
made with the flags of other CPUs. The last output is a table of results. Arguments are pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

#: Values of oneDNN's variable and of torch's, with the flag without which a CPU can't have them.
ONEDNN = (
    ("AVX2", "avx2"), ("AVX512_CORE", "avx512bw"), ("AVX512_CORE_BF16", "avx512_bf16"),
)  # fmt: skip
ATEN = (("default", "sse2"), ("avx2", "avx2"))
#: What is tried by planted flags, where no tests are named: what goes by flags.
PLANTED = ("avx2", "amx", "avx512_fp16")
PLANNING = (
    "tests/planning",
    "tests/precision",
    "tests/engine",
    "tests/fast_paths",
    "tests/end_to_end",
)


@dataclass(frozen=True)
class Setting:
    """One run of the tests: its name, variables, and arguments of its own."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def settings(flags: frozenset[str], given: Sequence[str] = ()) -> Iterator[Setting]:
    """Those that make sense on a CPU of these flags; `given` are pytest's arguments."""
    for variable, values in (("ONEDNN_MAX_CPU_ISA", ONEDNN), ("ATEN_CPU_CAPABILITY", ATEN)):
        for value, needs in values:
            if needs in flags:
                yield Setting(f"{variable}={value}", {variable: value})
    yield Setting("all that the CPU has")
    names_tests = any("tests" in each for each in given)
    for cpu in PLANTED:
        yield Setting(f"flags of {cpu}", {}, ("--cpu", cpu, *(() if names_tests else PLANNING)))


def main(given: Sequence[str]) -> int:
    """Run all of them; 1 if one failed."""
    from everyframe.hardware.cpu import processor_flags

    variables = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    plain = {name: value for name, value in os.environ.items() if name not in variables}
    os.environ.clear()
    os.environ.update(plain)
    rows = []
    for setting in settings(processor_flags(), given):
        print(f"== {setting.name}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", *setting.arguments, *given]
        done = subprocess.run(command, cwd=ROOT, env={**plain, **setting.variables}, check=False)
        verdict = "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"
        rows.append((setting.name, verdict, f"{time.monotonic() - began:.0f} s"))
    print()
    for row in rows:
        print(f"{row[0]:38} {row[1]:12} {row[2]:>7}")
    return int(any(verdict != "passed" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
