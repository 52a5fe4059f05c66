"""Report of the doctor as frozen data with a JSON schema: findings, checks, verdict.

`diagnose` makes a report. `shareable` removes private data from it.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from everyframe.core.options import Options
from everyframe.hardware.known_issues import Fix

#: ``fine``, ``note`` (works, worth knowing), ``error``, ``broke`` (the check itself did).
Mark = Literal["fine", "note", "error", "broke"]

_WORST_LAST: tuple[Mark, ...] = ("fine", "note", "broke", "error")


class Finding(Options):
    """One finding: what, why, and its fixes, best first."""

    mark: Mark
    message: str = Field(description="What was found, in a line.")
    cause: str | None = Field(default=None, description="Why.")
    fix: tuple[Fix, ...] = Field(default=(), description="Fixes, best first.")
    issue: str | None = Field(default=None, description="Name of the known issue.")
    sources: tuple[str, ...] = Field(default=(), description="Where it was reported.")
    evidence: dict[str, Any] = Field(default_factory=dict, description="What was measured.")


class Check(Options):
    """One check: its worst mark, a line, what it found, and `details` for who asks for all."""

    name: str
    mark: Mark
    message: str
    findings: tuple[Finding, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        message: str,
        findings: Iterable[Finding] = (),
        details: Iterable[str] = (),
        seconds: float = 0.0,
    ) -> Check:
        """Build a check with the worst mark of its findings."""
        found = tuple(findings)
        return cls(
            name=name,
            mark=worst(each.mark for each in found),
            message=message,
            findings=found,
            details=tuple(details),
            seconds=round(seconds, 2),
        )


class Report(Options):
    """All checks on one machine. `machine` is its facts; `profile` the name if it is made up."""

    type: Literal["doctor"] = "doctor"
    version: Literal[3] = Field(default=3, description="Of this format.")
    everyframe: str
    profile: str | None = None
    model: str | None = None
    verdict: Mark
    message: str
    checks: tuple[Check, ...]
    tested: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any]

    @property
    def has_errors(self) -> bool:
        return self.verdict in ("error", "broke")


def worst(marks: Iterable[Mark]) -> Mark:
    """The worst of these marks; fine if there is none."""
    return max(marks, key=_WORST_LAST.index, default="fine")


def verdict_line(checks: Sequence[Check], where: str) -> str:
    """The last line: counts of errors and notes, or that all is well, and the device."""
    found = [finding.mark for check in checks for finding in check.findings]
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for word, number in (
            ("error", found.count("error")),
            ("check that broke", found.count("broke")),
            ("note", found.count("note")),
        )
        if number
    ]
    if "error" in found or "broke" in found:
        return f"Not ready: {', '.join(counted)} on {where}.".replace("brokes", "broke")
    return f"Ready on {where}{': ' + ', '.join(counted) if counted else ''}."


#: Variables whose value is a path or a list of paths; their names suffice in a shared report.
_PLACES = re.compile(r"(^|_)(PATH|DIR|HOME|FILE|CACHE|RUNS|PRELOAD)$")


def shareable(value: Any, private: Mapping[str, str] | None = None) -> Any:
    """Replace private text anywhere in plain data.

    `private` maps private text to its replacement; the default is built from this machine.
    """
    hidden = _private() if private is None else private
    if isinstance(value, str):
        return _hide(value, hidden)
    if isinstance(value, Mapping):
        return {key: _variable(key, each, hidden) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shareable(each, hidden) for each in value]
    return value


def _variable(name: str, value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str) and name.isupper() and _PLACES.search(name):
        return "(set)" if value else ""
    return shareable(value, hidden)


def _hide(text: str, hidden: Mapping[str, str]) -> str:
    # A line of its own may have spaces in its value; within a sentence a value ends at one.
    text = re.sub(r"^([A-Z][A-Z0-9_]*)=(.+)$|\b([A-Z][A-Z0-9_]*)=(\S+)", _hide_place, text)
    for private, instead in hidden.items():
        # Whole words only: a host called "h" must not remove letters.
        pattern = rf"(?<![\w-]){re.escape(private)}(?![\w-])"
        text = re.sub(pattern, instead.replace("\\", r"\\"), text, flags=re.IGNORECASE)
    # Homes of other users, for example in a library's path.
    return re.sub(r"(/home/|/Users/|\\Users\\)[^/\\\s:]+", r"~", text)


def _hide_place(written: re.Match[str]) -> str:
    """``NAME=(set)`` of a variable that holds a path; any other as it is."""
    name = written[1] or written[3]
    return f"{name}=(set)" if _PLACES.search(name) else written[0]


def _private() -> dict[str, str]:
    """Private text of this machine and its replacements, longest first."""
    found = {os.path.expanduser("~"): "~", platform.node(): "(host)"}
    try:
        found[getpass.getuser()] = "(user)"
    except (KeyError, OSError):  # a user without a name has none to hide
        found[""] = ""
    # Common names: hiding them only makes the text harder to read.
    for common in ("", "/", "~", "root", "user", "localhost", "ubuntu", "cpu", "cuda"):
        found.pop(common, None)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
