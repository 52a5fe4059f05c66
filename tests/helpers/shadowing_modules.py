"""A folder of modules that report their import, as an attacker may put into the current folder.

They have names of standard library modules and of packages that are imported early.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("queue", "socket", "selectors", "json", "torch", "numpy", "diffusers", "multiprocessing")


def plant(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Write them into `folder`; the file that is there once one of them ran."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder.parent / "imported"
    for name in names:
        program = f"open({str(trace)!r}, 'a').write({name!r} + chr(10))\n"
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
    return trace
