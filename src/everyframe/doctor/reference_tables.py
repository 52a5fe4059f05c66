"""Reference tables: tested combinations of device and versions, and environment variables.

Tested combinations are in ``tested.yaml``, variables in ``variables.yaml``;
``docs/how-to/doctor.md`` explains how to contribute the row of a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.core.options import Options
from everyframe.doctor.report import Finding
from everyframe.hardware.known_issues import Fix, read_yaml

#: Status of a combination.
Answer = Literal["tested", "untested", "known bad"]

_LIBRARIES = ("cublas", "cudnn")


class TestedRow(Options):
    """One tested combination; None matches anything, versions are specifiers."""

    device: str
    kind: str
    capability: str | None = None
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cublas: str | None = None
    cudnn: str | None = None
    result: Literal["good", "bad"]
    by: Literal["us", "report"]
    date: str
    evidence: str
    source: str | None = None


class TestedTable(Options):
    """The whole file: minimum versions that can work, and the rows."""

    minimum: dict[str, str]
    rows: tuple[TestedRow, ...]


@dataclass(frozen=True)
class TestedResult:
    """Status of a device, the matching row, and the row to contribute."""

    answer: Answer
    row: TestedRow | None
    own: dict[str, str]


@cache
def table() -> TestedTable:
    """The shipped table, validated."""
    text = files("everyframe.doctor").joinpath("tested.yaml").read_text(encoding="utf-8")
    return TestedTable(**read_yaml(text))


def look_up(
    machine: MachineFacts, device: DeviceFacts, rows: tuple[TestedRow, ...]
) -> TestedResult:
    """Whether this device was tested with this software. A bad row outweighs good ones."""
    software = machine.software
    assert software is not None
    own = own_row(device, software)
    fitting = [row for row in rows if _fits(row, device, software)]
    for answer, result, by in (("known bad", "bad", None), ("tested", "good", "us")):
        for row in fitting:
            if row.result == result and by in (None, row.by):
                return TestedResult("known bad" if answer == "known bad" else "tested", row, own)
    return TestedResult("untested", next(iter(fitting), None), own)


def own_row(device: DeviceFacts, software: SoftwareFacts) -> dict[str, str]:
    """The row of this machine to contribute, with known values only."""
    number = ".".join(map(str, device.capability)) if device.capability else None
    row: dict[str, str | None] = {
        "device": re.escape(device.name).replace("\\ ", " ").replace("\\-", "-"),
        "kind": device.kind,
        "capability": number,
        "driver": _exactly(software.driver if device.kind == "cuda" else None),
        "torch": _exactly(software.packages.get("torch")),
        "cuda": _exactly(software.cuda),
        **{name: _exactly(software.library(name)) for name in _LIBRARIES if software.cuda},
        "result": "good",
        "by": "us",
        "date": date.today().isoformat(),
        "evidence": "everyframe doctor",
    }
    return {name: value for name, value in row.items() if value}


def as_line(row: dict[str, str]) -> str:
    """Format the row as a line of ``tested.yaml``."""
    quoted = ", ".join(
        f'{name}: "{value}"' if re.search(r"[^a-z]", value) else f"{name}: {value}"
        for name, value in row.items()
    )
    return f"- {{{quoted}}}"


def too_old(software: SoftwareFacts) -> dict[str, tuple[str, str]]:
    """Packages below the minimum: name -> (installed, required)."""
    there: dict[str, Any] = {**software.packages, "python": software.python}
    return {
        name: (there[name], least)
        for name, least in table().minimum.items()
        if there.get(name) and not _is_in(there[name], f">={least}")
    }


def _fits(row: TestedRow, device: DeviceFacts, software: SoftwareFacts) -> bool:
    if row.kind != device.kind or not re.search(row.device, device.name):
        return False
    number = ".".join(map(str, device.capability)) if device.capability else None
    if row.capability is not None and row.capability != number:
        return False
    versions = (
        (row.driver, software.driver),
        (row.torch, software.packages.get("torch")),
        (row.cuda, software.cuda),
        (row.cublas, software.library("cublas")),
        (row.cudnn, software.library("cudnn")),
    )
    return all(asked is None or _is_in(version, asked) for asked, version in versions)


def _is_in(version: str | None, asked: str) -> bool:
    if not version:
        return False
    try:
        # Builds such as 2.13.0+cu126 are of that version.
        public = Version(Version(version).public)
    except InvalidVersion:
        return False
    return SpecifierSet(asked).contains(public, prereleases=True)


def _exactly(version: str | None) -> str | None:
    return None if version is None else f"=={version.partition('+')[0]}"


class Variable(Options):
    """Environment variables of equal meaning; see the head of ``variables.yaml``."""

    names: tuple[str, ...]
    effect: str
    here: str
    when: str = ".*"
    mark: Literal["note", "error"] = "note"
    fix: str | None = None


@cache
def variables_table() -> tuple[Variable, ...]:
    """The shipped table, validated, in order."""
    text = files("everyframe.doctor").joinpath("variables.yaml").read_text(encoding="utf-8")
    return tuple(Variable(**entry) for entry in read_yaml(text))


def meaning(name: str) -> Variable | None:
    """The first entry that names this variable, or None."""
    for entry in variables_table():
        if any(fnmatchcase(name, pattern) for pattern in entry.names):
            return entry
    return None


def findings(environment: Mapping[str, str], num_cores: int) -> Iterator[Finding]:
    """Findings about the variables that are set."""
    for name, value in environment.items():
        entry = meaning(name)
        if entry is None or not re.fullmatch(entry.when, value):
            continue
        fix = (Fix(do="turn it off", command=entry.fix),) if entry.fix else ()
        yield Finding(
            mark=entry.mark,
            message=f"{name}={value}",
            cause=f"{entry.effect} Here: {entry.here}.",
            fix=fix,
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and 0 < int(threads) < num_cores:
        yield Finding(
            mark="note",
            message=f"OMP_NUM_THREADS={threads} leaves cores idle that this process may use",
            cause=f"It may use {num_cores}; what the CPU computes takes longer with fewer.",
            fix=(Fix(do="use all of them", command="unset OMP_NUM_THREADS"),),
        )
