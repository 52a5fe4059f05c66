"""Results of a pipeline's call, and the generators among its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everyframe.diffusers_pipelines.calls.call_outputs import Array
from everyframe.diffusers_pipelines.files.components import STAGE


@dataclass(frozen=True)
class Made:
    """Result of a call: its videos with optional sound, and its raw output if requested."""

    videos: Sequence[tuple[Array, tuple[Array, int] | None]]
    output: Any = None


@dataclass(frozen=True)
class CallOutOfMemory:
    """Out-of-memory event of a call: message, component (may be empty) and step."""

    message: str
    at: str
    step: int

    @property
    def place(self) -> str:
        """Such as "step 3 of pipeline, in its vae"."""
        step = f"step {self.step} of {STAGE}" if self.step else f"before the first step of {STAGE}"
        return f"{step}, in its {self.at}" if self.at else step


def generators_in(values: Iterable[Any]) -> Iterator[torch.Generator]:
    """Generators among the arguments of a call, also in lists."""
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, torch.Generator):
                yield each
