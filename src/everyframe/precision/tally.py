"""What a dry run finds of one part while it is run, and as a value afterwards.

Not here: the run itself, which fills it (`rehearse`).
"""

from __future__ import annotations

from dataclasses import dataclass

from everyframe.core.plan import Precision
from everyframe.precision.islands import in_island
from everyframe.precision.rules import Finding
from everyframe.precision.work import Work, WorkCounter

#: A broken module repeats itself; so many findings are kept of each component.
MAX_FINDINGS = 20


@dataclass(frozen=True)
class Rehearsed:
    """What a dry run of one call found.

    `working_bytes` is the peak of what was alive beside the parameters, at `peak_at`; `seen` holds
    each (module, operation, dtype of its first operand) once, in order.
    """

    num_operations: int
    findings: tuple[Finding, ...]
    working_bytes: int
    peak_at: str
    work: Work
    seen: tuple[tuple[str, str, str], ...]

    @property
    def clashes(self) -> bool:
        """Whether two dtypes met in an operation that takes one."""
        return any(finding.kind == "clash" for finding in self.findings)

    def dtypes_in(self, part: str) -> frozenset[str]:
        """Floating dtypes that operations took in the modules of that name or pattern."""
        return frozenset(
            dtype for module, _, dtype in self.seen if dtype and in_island(module or ".", (part,))
        )


class Tally:
    """What was found of one part."""

    def __init__(self, precision: Precision | None) -> None:
        self.islands = precision.islands if precision is not None else ()
        self.num_operations = self.peak = 0
        self.peak_at = ""
        self.work = WorkCounter()
        self.findings: list[Finding] = []
        self.seen: dict[tuple[str, str, str], None] = {}

    def found(self) -> Rehearsed:
        return Rehearsed(
            num_operations=self.num_operations,
            findings=tuple(dict.fromkeys(self.findings)),
            working_bytes=self.peak,
            peak_at=self.peak_at,
            work=self.work.total(),
            seen=tuple(self.seen),
        )
