"""Variables of the environment that matter: what each does, and what stands for it here.

Read next: ``variables.yaml``, ``docs/how-to/doctor.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal

from everyframe.core.options import Options
from everyframe.doctor.report import Finding
from everyframe.hardware.known_issues import Mend, read_yaml


class Variable(Options):
    """Variables of the same meaning; see the head of ``variables.yaml``."""

    names: tuple[str, ...]
    says: str
    here: str
    when: str = ".*"
    mark: Literal["note", "trouble"] = "note"
    mend: str | None = None


@cache
def table() -> tuple[Variable, ...]:
    """The shipped table, checked, in its order."""
    text = files("everyframe.doctor").joinpath("variables.yaml").read_text(encoding="utf-8")
    return tuple(Variable(**entry) for entry in read_yaml(text))


def meaning(name: str) -> Variable | None:
    """What a variable means; the first entry that names it."""
    for entry in table():
        if any(fnmatchcase(name, pattern) for pattern in entry.names):
            return entry
    return None


def findings(environment: Mapping[str, str], num_cores: int) -> Iterator[Finding]:
    """What is to be said of the variables that are set."""
    for name, value in environment.items():
        entry = meaning(name)
        if entry is None or not re.fullmatch(entry.when, value):
            continue
        mend = (Mend(do="turn it off", command=entry.mend),) if entry.mend else ()
        yield Finding(
            mark=entry.mark,
            says=f"{name}={value}",
            cause=f"{entry.says} Here: {entry.here}.",
            mend=mend,
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and 0 < int(threads) < num_cores:
        yield Finding(
            mark="note",
            says=f"OMP_NUM_THREADS={threads} leaves cores idle that this process may use",
            cause=f"It may use {num_cores}; what the CPU computes takes longer with fewer.",
            mend=(Mend(do="use all of them", command="unset OMP_NUM_THREADS"),),
        )
