"""What the doctor says, as frozen data with a JSON schema: findings, checks, the verdict.

Read next: `diagnose`, which makes a report; `share`, which makes it fit to be shown to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from everyframe.core.options import Options
from everyframe.hardware.known_issues import Mend

#: ``fine``, ``note`` (works, worth knowing), ``trouble``, ``broke`` (the check itself did).
Mark = Literal["fine", "note", "trouble", "broke"]

_WORST_LAST: tuple[Mark, ...] = ("fine", "note", "broke", "trouble")


class Finding(Options):
    """One thing that was found: what, why, and what mends it, best way first."""

    mark: Mark
    says: str = Field(description="What was found, in a line.")
    cause: str | None = Field(default=None, description="Why.")
    mend: tuple[Mend, ...] = Field(default=(), description="Ways out, best first.")
    issue: str | None = Field(default=None, description="Name of the known issue.")
    sources: tuple[str, ...] = Field(default=(), description="Where it was reported.")
    evidence: dict[str, Any] = Field(default_factory=dict, description="What was measured.")


class Check(Options):
    """One check: its worst mark, a line, what it found, and `details` for who asks for all."""

    name: str
    mark: Mark
    says: str
    findings: tuple[Finding, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        says: str,
        findings: Iterable[Finding] = (),
        details: Iterable[str] = (),
        seconds: float = 0.0,
    ) -> Check:
        """A check with the worst mark of what it found."""
        found = tuple(findings)
        return cls(
            name=name,
            mark=worst(each.mark for each in found),
            says=says,
            findings=found,
            details=tuple(details),
            seconds=round(seconds, 2),
        )


class Report(Options):
    """All checks on one machine. `machine` is its facts; `profile` the name if it is made up."""

    type: Literal["doctor"] = "doctor"
    version: Literal[1] = Field(default=1, description="Of this format.")
    everyframe: str
    profile: str | None = None
    model: str | None = None
    verdict: Mark
    says: str
    checks: tuple[Check, ...]
    tested: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any]

    @property
    def is_trouble(self) -> bool:
        """Whether something is wrong, or could not be checked."""
        return self.verdict in ("trouble", "broke")


def worst(marks: Iterable[Mark]) -> Mark:
    """The worst of these marks; fine if there is none."""
    return max(marks, key=_WORST_LAST.index, default="fine")


def verdict_line(checks: Sequence[Check], where: str) -> str:
    """The last line: how many troubles and notes, or that all is well, on which device."""
    found = [finding.mark for check in checks for finding in check.findings]
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for word, number in (
            ("trouble", found.count("trouble")),
            ("check that broke", found.count("broke")),
            ("note", found.count("note")),
        )
        if number
    ]
    if "trouble" in found or "broke" in found:
        return f"Not ready: {', '.join(counted)} on {where}.".replace("brokes", "broke")
    return f"Ready on {where}{': ' + ', '.join(counted) if counted else ''}."
