"""The precision of each component, and its dry runs in that precision.

It is what the facts of the device say, where that is certified; float32 elsewhere. To know whether
it is, a component has to be run dry first, and in a pipeline what works beside it, too. Not here:
what speaks for a path or against it (`choosing.py`), and what the facts say
(`everyframe.precision.policy`). Read next: `dryrun.py`, `everyframe.families.family.Rehearsing`;
`components.py`, which asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Choice, Precision, Settings
from everyframe.families.family import (
    Component,
    JointRehearsal,
    Model,
    Rehearsal,
    Rehearsing,
    Shared,
)
from everyframe.planning.choosing import Chooser
from everyframe.planning.dryrun import DryRun, dry_run, joint_dry_run, not_followed
from everyframe.precision.policy import choose

if TYPE_CHECKING:
    from everyframe.parallel.team import Teams

_Beside = Callable[[Settings], Mapping[str, Precision]]
"""The precision of every component, for a call in which several work."""


@dataclass(frozen=True)
class Chosen:
    """A component's precision, what is said of it, the paths that were weighed, and its dry runs.

    `notes` also tell of calls that no dry run could follow.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[Choice, ...]
    runs: tuple[DryRun, ...]


@dataclass(frozen=True)
class Precisions:
    """Those of a model's components on a device; `asked` is the dtype of the request.

    With `teams`, it is one rank of theirs.
    """

    model: Model
    device: DeviceFacts
    asked: str
    chooser: Chooser
    teams: Teams | None = None
    force: bool = False

    def rehearsals(self, settings: Settings) -> Sequence[Rehearsal]:
        """The calls that are run dry, in the order of the stages."""
        if self.teams is not None and isinstance(self.model, Shared):
            return self.model.shared_rehearsals(settings, self.teams)
        return self.model.rehearsals(settings) if isinstance(self.model, Rehearsing) else ()

    def rehearsals_of(self, component: str, settings: Settings) -> list[Rehearsal]:
        """Those of one component."""
        return [each for each in self.rehearsals(settings) if each.component == component]

    def by_facts(self, component: Component, kind: str) -> tuple[Precision, tuple[str, ...]]:
        """What the facts of the device say, with its weights in `kind`, and notes."""
        if component.has_precision is not None:
            return component.has_precision, ()
        return self._in_dtype(component, self.asked, kind)

    def chosen(
        self, component: Component, settings: Settings, kind: str, *, roughly: bool = False
    ) -> Chosen:
        """What it runs in, with its weights in `kind`.

        With `roughly` whole calls of a pipeline, which take seconds, are not run dry.
        """
        found = self._weighed(component, settings, kind, roughly=roughly)
        precision, tried = found.precision, found.tried
        if tried is None:
            tried = self._tried(component, settings, precision, self._all_weighed, roughly=roughly)
        runs = tuple(run for run in tried if isinstance(run, DryRun))
        whys = (not_followed(component.title, why) for why in tried if isinstance(why, str))
        return Chosen(precision, (*found.notes, *whys), found.choices, runs)

    def _weighed(
        self, component: Component, settings: Settings, kind: str, *, roughly: bool = False
    ) -> _Weighed:
        """The precision by facts if it is certified, else float32."""
        precision, notes = self.by_facts(component, kind)
        tried = self._tried(component, settings, precision, self._all_by_facts, roughly=roughly)
        runs = [run for run in tried if isinstance(run, DryRun)]
        # Where a call was not followed there is nothing to try a precision on.
        may_try = len(runs) == len(tried) and not (roughly and not runs)
        dtype, weighed = self.chooser.dtype(component, precision, runs, may_try=may_try)
        if dtype != precision.compute:
            return _Weighed(*self._in_dtype(component, dtype, kind), weighed)
        # What works beside a component may have another precision than by facts.
        is_joint = any(isinstance(run.rehearsal, JointRehearsal) for run in runs)
        return _Weighed(precision, notes, weighed, None if is_joint else tried)

    def _in_dtype(
        self, component: Component, dtype: str, kind: str
    ) -> tuple[Precision, tuple[str, ...]]:
        precision, notes = choose(self.device, dtype, component.needs, force=self.force)
        if not kind:
            return precision, notes
        # What is too delicate for half precision is so for eight bits, whatever the rest is in.
        islands = precision.islands or component.needs.islands
        return replace(precision, islands=islands, weights=kind), notes

    def _tried(
        self,
        component: Component,
        settings: Settings,
        precision: Precision,
        beside: _Beside,
        *,
        roughly: bool,
    ) -> tuple[DryRun | str, ...]:
        """The dry runs of a component; why there is none in place of one that can't be had."""
        found: list[DryRun | str] = []
        for each in self.rehearsals_of(component.name, settings):
            if not isinstance(each, JointRehearsal):
                found.append(dry_run(each, precision, self.device))
            elif not roughly:
                together = {**beside(settings), component.name: precision}
                found.append(joint_dry_run(each, together, self.device))
        return tuple(found)

    def _all_by_facts(self, settings: Settings) -> Mapping[str, Precision]:
        """Every component's by facts; the weights of a pipeline's parts are kept whole."""
        return {each.name: self.by_facts(each, "")[0] for each in self.model.components(settings)}

    def _all_weighed(self, settings: Settings) -> Mapping[str, Precision]:
        """Every component's as it will run."""
        components = self.model.components(settings)
        return {each.name: self._weighed(each, settings, "").precision for each in components}


class _Weighed(NamedTuple):
    """A precision, its notes, and the paths that were weighed for it.

    `tried` are the dry runs by which that was done, where they are also those of the plan.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[Choice, ...]
    tried: tuple[DryRun | str, ...] | None = None
