"""What a run saves to resume with the same bits: out-of-memory events and pipeline answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from everyframe.core.plan import Repair


@dataclass(frozen=True)
class OomEvent:
    """An out-of-memory event in the video of `seed`, after `step` finished steps.

    `call` counts the stage's calls since then, from 0; `at` is the component of a pipeline.
    """

    seed: int | None
    step: int = 0
    call: int = 0
    at: str = ""


class OomLog(Protocol):
    """Out-of-memory events of one stage, saved beyond the process."""

    def known(self) -> tuple[OomEvent, ...]:
        """Saved events, in order."""
        ...

    def keep(self, event: OomEvent) -> None:
        """Save one event; returns when it is saved."""
        ...


@dataclass(frozen=True)
class GivenInput:
    """In place of an input that an output hands back; `name` is its parameter."""

    name: str


class ReplayLog(Protocol):
    """Outputs of a diffusers pipeline's models, call by call, saved beyond the process."""

    def next(self, call: str) -> Any:
        """Saved output of the next call; None if the call has to run.

        `call` is a digest of its inputs: an output is reused for the same inputs only.
        """
        ...

    def keep(self, answer: Any, repairs: tuple[Repair, ...]) -> None:
        """Save the output of the oldest call that has run since, with the repairs it needed."""
        ...

    def again(self) -> None:
        """Restart from the first call."""
        ...

    def repairs(self) -> tuple[Repair, ...]:
        """Repairs of the last saved output."""
        ...
