"""One component of a plan at given settings: its precision, fast paths, memory, and dry runs.

What it holds while it works is the peak of its stages' dry runs. Not here: which settings, and
whether all of it fits (`fitting.py`). Read next: `dryrun.py`, `choosing.py`,
`everyframe.families.family.Rehearsing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Choice, ComponentPlan, Precision, Remedy, Settings
from everyframe.families.family import (
    Component,
    JointRehearsal,
    Model,
    Rehearsal,
    Rehearsing,
    Shared,
)
from everyframe.families.remembered import remedies_for
from everyframe.planning.choosing import Chooser, score_bytes, told, used
from everyframe.planning.dryrun import DryRun, dry_run, joint_dry_run, not_followed
from everyframe.planning.quantising import WHOLE, WORTH, Quantising
from everyframe.planning.quantising import told as told_of_weights
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import weight_bytes
from everyframe.precision.policy import choose

if TYPE_CHECKING:
    from everyframe.parallel.team import Teams

_FILE_ELEMENT = 4
"""Bytes of a number in a file, at most in practice."""


@dataclass(frozen=True)
class Part:
    """One component at certain settings; `notes` are what the person should know of it."""

    plan: ComponentPlan
    runs: tuple[DryRun, ...]
    notes: tuple[str, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that it was run dry in."""
        return tuple(dict.fromkeys(run.rehearsal.stage for run in self.runs))

    def in_stage(self, stage: str | None) -> tuple[int, bool]:
        """Bytes that it holds at most in that stage, or in any; whether a tensor is too large."""
        runs = [run for run in self.runs if stage in (None, run.rehearsal.stage)]
        too_large = any(run.too_large for run in runs)
        if stage is None or not runs:
            return self.plan.peak_bytes, too_large
        working = max(run.found.working_bytes for run in runs) + score_bytes(runs, self.plan.paths)
        return self.plan.held_bytes + working, too_large


@dataclass(frozen=True)
class Parts:
    """The components of a model on a device, one by one; `asked` is the dtype of the request.

    `host_memory` bytes are free beside the device; `remedies` are the repairs that components have
    from the start where they have that dtype. `chooser` chooses fast paths; without one those are
    expected that the device could have. `quantising` is which weights may be kept in eight bits.
    With `teams`, it is one rank of theirs, of which `holders` can keep the denoiser's weights
    between them, and do if it `shards`; `room` is how much each, where they are not alike.
    """

    model: Model
    device: DeviceFacts
    asked: str
    force: bool
    host_memory: int
    remedies: tuple[Remedy, ...] = ()
    chooser: Chooser | None = None
    quantising: Quantising = WHOLE
    teams: Teams | None = None
    holders: int = 1
    room: tuple[float, ...] = ()
    shards: bool = False

    def named(
        self,
        name: str,
        settings: Settings,
        *,
        offload: bool = False,
        holders: int = 1,
        roughly: bool = False,
        kind: str | None = None,
    ) -> Part:
        """The component of that name; see `part`."""
        components = self.model.components(settings)
        component = next(each for each in components if each.name == name)
        return self.part(
            component, settings, offload=offload, holders=holders, roughly=roughly, kind=kind
        )

    def part(
        self,
        component: Component,
        settings: Settings,
        *,
        offload: bool,
        holders: int = 1,
        roughly: bool = False,
        kind: str | None = None,
    ) -> Part:
        """The component at these settings, with `offload` its weights waiting on the host.

        `holders` ranks keep its weights between them. `kind` is one of `kinds`, None the first.
        With `roughly` whole calls of a pipeline, which take seconds, are not run dry.
        """
        chooser = self.chooser or Chooser(self.device)
        kind = self._first_kind(component, settings) if kind is None else kind
        chosen = self._chosen(component, settings, chooser, kind, roughly=roughly)
        precision, notes = chosen.precision, chosen.notes
        tried = chosen.tried
        if tried is None:
            tried = self._runs(component, settings, chooser, precision, roughly=roughly)
        runs = tuple(run for run in tried if isinstance(run, DryRun))
        notes += tuple(not_followed(component.title, why) for why in tried if isinstance(why, str))
        choices = (*chosen.choices, *chooser.choices(component.name, precision, runs))
        paths = used(choices) if runs or len(choices) > len(chosen.choices) else None
        remedies = remedies_for(component.name, precision.parameters, self.remedies)
        holders = max(holders, self.holders_of(component)) if self.shards else holders
        weights = self._weight_bytes(component, settings, precision, remedies)
        # A pipeline's parts are read by diffusers and transformers, whole.
        is_ours = not any(isinstance(run.rehearsal, JointRehearsal) for run in runs)
        waits = weights + frame_bytes(settings) if is_ours else 0
        plan = ComponentPlan(
            name=component.name,
            title=component.title,
            stage=component.stage,
            source=component.source,
            num_parameters=sum(component.num_elements.values()),
            device=self.device.torch_name,
            precision=precision,
            weight_bytes=weights,
            working_bytes=self._working_bytes(component, runs, precision)
            + score_bytes(runs, paths),
            **self._elsewhere(runs, precision, waits, offload, holders),
            remedies=remedies,
            paths=paths,
            choices=choices,
        )
        notes += told(component.title, choices, precision)
        notes += tuple(told_of_weights(component.title, precision, self.quantising))
        return Part(plan, runs, (*notes, *(note for run in runs for note in run.notes())))

    def _elsewhere(
        self, runs: Sequence[DryRun], precision: Precision, waits: int, offload: bool, holders: int
    ) -> dict[str, Any]:
        """What a plan says of weights that are not on the device; nothing of those that are.

        `waits` bytes would lie on the host.
        """
        if not runs or not (offload or holders > 1):
            return {}
        return {
            "offload": offload,
            "streams": offload and waits > self.host_memory,
            "holders": holders,
            "resident_bytes": self._resident_bytes(runs[0].rehearsal, precision, holders),
        }

    def kinds(self, component: Component, settings: Settings) -> tuple[str, ...]:
        """What its weights may be kept in, the most exact first; "" is their own dtype."""
        kinds = self.quantising.kinds(component.name)
        last = kinds[-1]
        # What was made for float32 is the smaller part, and wants its digits.
        if not last or component.has_precision or component.needs.prefers == "float32":
            return ("",)
        whole, less = (self.weights_alone(component, settings, kind) for kind in ("", last))
        return kinds if less < WORTH * whole else ("",)

    def _first_kind(self, component: Component, settings: Settings) -> str:
        first = self.quantising.kinds(component.name)[0]
        return self.kinds(component, settings)[0] if first else first

    def weights_alone(self, component: Component, settings: Settings, kind: str) -> int:
        """Bytes that its weights take here at least, however little is computed at once."""
        precision, holders = self._by_facts(component, kind)[0], self.holders_of(component)
        if holders == 1:
            return self._weight_bytes(component, settings, precision)
        (call, *_) = self._rehearsals(component.name, settings)
        return self._resident_bytes(call, precision, holders)

    def _resident_bytes(self, rehearsal: Rehearsal, precision: Precision, holders: int) -> int:
        """What is on the device at most of weights that come block by block."""
        from everyframe.families.holding import held_bytes
        from everyframe.families.offload import resident_bytes

        if holders == 1:
            return resident_bytes(rehearsal.part(), precision)
        if not self.room or self.teams is None:
            return held_bytes(rehearsal.part(), precision, [1.0] * holders)
        return held_bytes(rehearsal.part(), precision, self.room, self.teams.team.rank)

    def holders_of(self, component: Component) -> int:
        """How many ranks can keep its weights between them: those that call it together."""
        return self.holders if component.stage == "denoise" else 1

    def _weight_bytes(
        self,
        component: Component,
        settings: Settings,
        precision: Precision,
        remedies: Sequence[Remedy] = (),
    ) -> int:
        """Bytes of its parameters; those in eight bits with their scales."""
        found: Mapping[str, int] = {}
        if precision.weights:
            found = _rows(self._rehearsals(component.name, settings), precision)
        return weight_bytes(component.num_elements, precision, remedies, found)

    def rehearsals(self, settings: Settings) -> Sequence[Rehearsal]:
        """The calls that are run dry, in the order of the stages."""
        if self.teams is not None and isinstance(self.model, Shared):
            return self.model.shared_rehearsals(settings, self.teams)
        return self.model.rehearsals(settings) if isinstance(self.model, Rehearsing) else ()

    def _by_facts(self, component: Component, kind: str) -> tuple[Precision, tuple[str, ...]]:
        if component.has_precision is not None:
            return component.has_precision, ()
        return self._in_dtype(component, self.asked, kind)

    def _in_dtype(
        self, component: Component, dtype: str, kind: str
    ) -> tuple[Precision, tuple[str, ...]]:
        precision, notes = choose(self.device, dtype, component.needs, force=self.force)
        if not kind:
            return precision, notes
        # What is too delicate for half precision is so for eight bits, whatever the rest is in.
        islands = precision.islands or component.needs.islands
        return replace(precision, islands=islands, weights=kind), notes

    def _rehearsals(self, name: str, settings: Settings) -> list[Rehearsal]:
        return [each for each in self.rehearsals(settings) if each.component == name]

    def _chosen(
        self,
        component: Component,
        settings: Settings,
        chooser: Chooser,
        kind: str,
        *,
        roughly: bool = False,
    ) -> _Chosen:
        """The precision that it has by facts of the device, if that is certified."""
        precision, notes = self._by_facts(component, kind)
        tried = self._runs(component, settings, None, precision, roughly=roughly)
        runs = [run for run in tried if isinstance(run, DryRun)]
        # Where a call was not followed there is nothing to try a precision on.
        may_try = len(runs) == len(tried) and not (roughly and not runs)
        dtype, weighed = chooser.dtype(component, precision, runs, may_try=may_try)
        if dtype != precision.compute:
            precision, notes = self._in_dtype(component, dtype, kind)
            return _Chosen(precision, notes, weighed)
        # What works beside a component may have another precision than by facts.
        is_joint = any(isinstance(run.rehearsal, JointRehearsal) for run in runs)
        return _Chosen(precision, notes, weighed, None if is_joint else tried)

    def _runs(
        self,
        component: Component,
        settings: Settings,
        chooser: Chooser | None,
        precision: Precision,
        *,
        roughly: bool,
    ) -> tuple[DryRun | str, ...]:
        """The dry runs of a component; why there is none in place of one that can't be had.

        Those that work beside it have what `chooser` finds, or what they have by facts.
        """
        found: list[DryRun | str] = []
        for each in self._rehearsals(component.name, settings):
            if not isinstance(each, JointRehearsal):
                found.append(dry_run(each, precision, self.device))
            elif not roughly:
                beside = self._beside(settings, chooser)
                all_ = {**beside, component.name: precision}
                found.append(joint_dry_run(each, all_, self.device))
        return tuple(found)

    def _beside(self, settings: Settings, chooser: Chooser | None) -> dict[str, Precision]:
        """The precision of every component; the weights of a pipeline's parts are kept whole."""
        return {
            each.name: self._by_facts(each, "")[0]
            if chooser is None
            else self._chosen(each, settings, chooser, "").precision
            for each in self.model.components(settings)
        }

    def _working_bytes(
        self, component: Component, runs: Sequence[DryRun], precision: Precision
    ) -> int:
        """The peak of what its stages hold, or of a tensor on its way from the file."""
        if not runs:
            assert component.working_bytes is not None, "no rehearsal and no forecast"
            return component.working_bytes(num_bytes(precision.compute))
        loading = 0
        # What has the file's dtype is read straight into its place; the rest is cast on the way.
        is_cast = bool(precision.weights) or num_bytes(precision.parameters) < _FILE_ELEMENT
        if self.device.kind == "cpu" and is_cast:
            loading = max(component.num_elements.values(), default=0) * _FILE_ELEMENT
        return max(loading, *(run.found.working_bytes for run in runs))


def frame_bytes(settings: Settings) -> int:
    """Finished frames on the host: as floats while a piece is handed over, and as bytes."""
    return settings.num_frames * settings.height * settings.width * 3 * (4 + 1)


def _rows(rehearsals: Sequence[Rehearsal], precision: Precision) -> Mapping[str, int]:
    """The weights in eight bits of a component that is loaded here; none of a pipeline's parts."""
    from everyframe.precision.quantised import rows

    alone = [each for each in rehearsals if not isinstance(each, JointRehearsal)]
    return rows(alone[0].module(), precision) if alone else {}


@dataclass(frozen=True)
class _Chosen:
    """A component's precision, what is said of it, and the paths that were weighed for it.

    `tried` are its dry runs, where those by which it was chosen are also those of the plan.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    tried: tuple[DryRun | str, ...] | None = None
