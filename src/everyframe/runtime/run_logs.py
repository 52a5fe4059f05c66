"""What a run saves to resume with the same bits: out-of-memory events and pipeline answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from everyframe.core.plan import Repair


@dataclass(frozen=True)
class OomEvent:
    """That memory ran out in the video of `seed`, when `step` of its steps were done.

    `call` counts the calls of the stage since then, from 0; `at` is the component of a pipeline.
    """

    seed: int | None
    step: int = 0
    call: int = 0
    at: str = ""


class OomLog(Protocol):
    """Those of one stage, kept over the end of a process."""

    def known(self) -> tuple[OomEvent, ...]:
        """Those of before, in their order."""
        ...

    def keep(self, shortage: OomEvent) -> None:
        """Keep one more, and come back when it is kept."""
        ...


class ReplayLog(Protocol):
    """What a foreign pipeline's models answered, call by call, kept over the end of a process."""

    def next(self, call: str) -> Any:
        """The answer to the next call; None where the call has to be made.

        `call` is a digest of what it is given: only to the same was there the same answer.
        """
        ...

    def keep(self, answer: Any, remedies: tuple[Repair, ...]) -> None:
        """Keep the answer to the oldest call that was made since, with the repairs it needed."""
        ...

    def again(self) -> None:
        """From the first call on."""
        ...

    def remedies(self) -> tuple[Repair, ...]:
        """The repairs of the last answer that is there."""
        ...
