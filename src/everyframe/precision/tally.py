"""What a dry run finds of one part while it is run.

Not here: the run itself, which fills it (`rehearse`), and the value that is left of it
(`dry_run_result`).
"""

from __future__ import annotations

from everyframe.core.plan import Precision
from everyframe.precision.dry_run_result import Finding, Rehearsed
from everyframe.precision.work import WorkCounter

#: A broken module repeats itself; so many findings are kept of each component.
MAX_FINDINGS = 20


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
