"""Too little memory while a stage runs: done in less, from the least change to the most.

What the family's `savings` offer comes first, then the stage's weights wait on the host and come
block by block. Whatever is chosen holds for the rest of the stage, for all of its videos. Not here:
what a plan chooses before anything runs (`everyframe.planning.fitting`).
Read next: `guarding.py`, whose calls are repeated; `offload.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from everyframe.core.plan import Plan, Settings
from everyframe.families import offload
from everyframe.families.family import Saving

Savings = Callable[[str, Settings], Iterator[Saving]]
"""What a family offers for a component at these settings; see `family.Rehearsing.savings`."""


@dataclass(frozen=True)
class Relief:
    """What was done, as a person reads it, and for which component."""

    component: str
    says: str


class Reliefs:
    """The ways to do with less memory, each once; `settings` are those that hold by now.

    `count` is how many of them were done.
    """

    def __init__(self, plan: Plan, parts: Mapping[str, nn.Module], savings: Savings | None) -> None:
        self.settings = plan.settings
        self.count = 0
        self._plan = plan
        self._parts = parts
        self._savings = savings
        self._left = self._ways()

    def next(self) -> Relief | None:
        """Do the next one; None where there is none left. What torch keeps is given back first."""
        for accelerator in (torch.cuda, torch.mps):
            if accelerator.is_available():
                accelerator.empty_cache()
        relief = next(self._left, None)
        self.count += relief is not None
        return relief

    def redo(self, count: int) -> None:
        """Do the first `count` of them, as a run that is gone on with had done."""
        while self.count < count and self.next() is not None:
            continue

    def _ways(self) -> Iterator[Relief]:
        on_host = self._plan.device.kind == "cpu"
        if not on_host:
            yield Relief("", "what was kept for later is given back")
        for name in self._parts if self._savings is not None else ():
            assert self._savings is not None
            for saving in self._savings(name, self.settings):
                self.settings = saving.settings
                yield Relief(name, saving.says)
        for name, part in self._parts.items() if not on_host else ():
            if not self._plan.component(name).offload:
                part.to("cpu")
                offload.apply(part, self._plan.component(name).device)
                yield Relief(
                    name, "its weights wait in the host's memory and come to the device by blocks"
                )
