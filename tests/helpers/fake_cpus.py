"""Fake CPUs for tests of a plan's choices by CPU flags, on any CPU.

Only the facts are fake: the real CPU computes, with its own instructions. Other processes see the
real flags.
"""

from __future__ import annotations

import re
from pathlib import Path

from everyframe.hardware import cpu

_AVX2 = "fpu sse sse2 ssse3 sse4_1 sse4_2 avx f16c fma avx2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"

#: Flags by the name that ``pytest --cpu`` takes.
FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": f"{_AVX512} avx512_bf16",
    "amx": f"{_AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8",
    "avx512_fp16": f"{_AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8 avx512_fp16 amx_fp16",
}


def proc_with(name: str, folder: Path) -> Path:
    """A folder in place of ``/proc`` whose processor has these flags, and is else the one here."""
    real = Path("/proc")
    text = (real / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"^(flags|Features)(\s*:).*$", "", text, flags=re.M)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpuinfo").write_text(f"{text}\nflags : {FLAGS[name]}\n", encoding="utf-8")
    if not (folder / "self").exists():
        (folder / "self").symlink_to(real / "self")
    return folder


def plant(name: str, folder: Path) -> None:
    """Have this process take its processor for that one."""
    cpu._PROC = proc_with(name, folder)
