"""What all stages of a run share: the plan, the model and the ranks; and how they load a component.

A family's own `Job` adds what its stages ask for besides. Read next: `staged.py` for the model,
`loading.py` for what loading is, `coding.py` and `stepping.py` for what stages then do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from everyframe.core.events import Event, Loaded
from everyframe.core.plan import Plan, Settings
from everyframe.families.guarding import Guard
from everyframe.families.loading import load_component
from everyframe.families.staged import StagedModel
from everyframe.parallel.team import ONE, Teams

_Model = TypeVar("_Model", bound=StagedModel[Any, Any, Any])


@dataclass(frozen=True)
class Job(Generic[_Model]):
    """The plan, the model and the ranks of a run."""

    plan: Plan
    model: _Model
    teams: Teams = ONE

    @property
    def settings(self) -> Settings:
        """The plan's settings."""
        return self.plan.settings

    def device(self, component: str) -> str:
        """Where a component runs."""
        return self.plan.component(component).device

    def loaded(self, component: str) -> Generator[Event, None, Any]:
        """A component with its weights, and an event that says how long that took."""
        began = time.perf_counter()
        sizes = self.model.sizes
        module = load_component(
            self.plan.component(component),
            partial(sizes.taken, component),
            *self.model.weights(component),
            outputs=sizes.outputs(component),
            supply=self.teams.supply,
        )
        yield Loaded(component, time.perf_counter() - began)
        return module

    def guard(
        self,
        stage: str,
        parts: Mapping[str, nn.Module],
        apart: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> Guard:
        """What watches these components in that stage; see `Guard`."""
        return Guard(self.plan, stage, parts, savings=self.model.savings, apart=apart)
