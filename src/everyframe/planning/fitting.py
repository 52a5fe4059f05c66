"""Makes a video fit into the memory that there is, and finds the largest one that does.

What a component needs is forecast by running its stages dry. Where that is too much, the family's
exact savings are tried, then its weights are offloaded block by block, then lossy savings.
Stages are loaded one after the other in any case; parts that one stage needs together come by turns
where they don't fit side by side. Not here: what is asked and what is said to the
person (`resolve.py`). Read next: `dryrun.py`, `everyframe.families.family.Rehearsing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from everyframe.core.division import Division
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Choice, ComponentPlan, Precision, Remedy, Settings, peak_of
from everyframe.families.family import (
    Component,
    JointRehearsal,
    Model,
    Rehearsal,
    Rehearsing,
    Saving,
    Shared,
)
from everyframe.families.remembered import remedies_for
from everyframe.planning.choosing import Chooser, score_bytes, told, used
from everyframe.planning.dividing import Effort
from everyframe.planning.dryrun import DryRun, dry_run, joint_dry_run, not_followed
from everyframe.planning.forecast import fits
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import weight_bytes
from everyframe.precision.policy import choose

if TYPE_CHECKING:
    from everyframe.parallel.team import Team

_FILE_ELEMENT = 4
"""Bytes of a number in a file, at most in practice."""

_TRIES = 2
"""So many of the largest that could fit are looked at closely."""


@dataclass(frozen=True)
class Fitted:
    """Settings and components as they will run; `says` is what was done so that they fit.

    `fits` is whether that was enough.
    """

    settings: Settings
    components: tuple[ComponentPlan, ...]
    runs: tuple[DryRun, ...]
    says: tuple[str, ...]
    notes: tuple[str, ...]
    host_bytes: int
    fits: bool


@dataclass(frozen=True)
class _Part:
    """One component at certain settings."""

    plan: ComponentPlan
    runs: tuple[DryRun, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Fitting:
    """A model on a device: `asked` is the dtype of the request, `host_memory` bytes that are free,
    `remedies` the repairs that components have from the start where they have that dtype.

    `chooser` chooses fast paths; without one those are expected that the device could have. `fit`
    answers for given settings, `largest` finds smaller ones that fit. With
    `team`, one rank of it is fitted, its samples in `groups`; `copies` ranks have this device's
    memory in common.
    """

    model: Model
    device: DeviceFacts
    asked: str
    force: bool
    host_memory: int
    remedies: tuple[Remedy, ...] = ()
    chooser: Chooser | None = None
    team: Team | None = None
    groups: int = 1
    copies: int = 1

    def fit(self, settings: Settings) -> Fitted:
        """The components at these settings, with the savings that make each of them fit."""
        says: list[str] = []
        parts: list[_Part] = []
        for component in self.model.components(settings):
            settings, part, said = self._saved(component.name, settings)
            says += said
            parts.append(part)
        if says:
            # A saving of one component may be seen by another.
            offloaded = {part.plan.name for part in parts if part.plan.offload}
            parts = [
                self._part(each, settings, offload=each.name in offloaded)
                for each in self.model.components(settings)
            ]
        if not self._hold(parts) and self.device.kind != "cpu":
            parts, said = _by_turns(parts)
            says += said
        plans = tuple(part.plan for part in parts)
        host = self._host_bytes(plans, settings)
        return Fitted(
            settings=settings,
            components=plans,
            runs=_in_order(self._rehearsals(settings), parts),
            says=tuple(says),
            notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            host_bytes=host,
            fits=self._hold(parts) and host <= self.host_memory,
        )

    def of_ranks(self, division: Division | None) -> Fitting:
        """Fitting for the rank that has the most to do."""
        if division is None:
            return self
        from everyframe.parallel.team import Imagined

        heaviest = max(division.ranks, key=lambda rank: max(rank.columns, rank.rows))
        group = division.groups[heaviest.group]
        place = group.index(division.ranks.index(heaviest))
        team = Imagined(place, [division.weights[rank] for rank in group])
        copies = len(division.ranks) if self.device.kind == "cpu" else 1
        return replace(self, team=team, groups=division.cfg, copies=copies)

    def effort(self, settings: Settings) -> Effort:
        """What one step of a video takes on one device, for the choice between ways to divide."""
        if not isinstance(self.model, Shared):
            return Effort(1.0, 1)
        step = next(each for each in self._rehearsals(settings) if each.stage == "denoise")
        part = self._named(step.component, settings)
        run = next(each for each in part.runs if each.rehearsal.stage == "denoise")
        return Effort(run.found.work.operations, num_bytes(part.plan.precision.compute))

    def largest(self, settings: Settings) -> Fitted | None:
        """The largest smaller video that fits, or None."""
        candidates = list(self.model.smaller(settings))
        low, high = 0, len(candidates)
        # They are sorted, and what is smaller needs less: halving takes few dry runs.
        while low < high:
            middle = (low + high) // 2
            if self._could(candidates[middle]):
                high = middle
            else:
                low = middle + 1
        for candidate in candidates[low : low + _TRIES]:
            fitted = self.fit(candidate)
            if fitted.fits:
                return fitted
        return None

    def _could(self, settings: Settings) -> bool:
        """Whether every component fits with all that can be saved."""
        parts: list[_Part] = []
        for component in self.model.components(settings):
            least = settings
            if isinstance(self.model, Rehearsing):
                for saving in self.model.savings(component.name, settings):
                    least = saving.settings
            offload = self.device.kind != "cpu"
            # Whole calls of a pipeline would take minutes for all that are tried here.
            parts.append(self._named(component.name, least, offload=offload, roughly=True))
            if not self._holds(parts[-1]):
                return False
        return self._hold(parts)

    def _saved(self, name: str, settings: Settings) -> tuple[Settings, _Part, list[str]]:
        """The first settings with which that component fits, or those that need the least."""
        part = self._named(name, settings)
        if self._holds(part) or not isinstance(self.model, Rehearsing):
            return settings, part, []
        said: list[str] = []
        for way in self._ways(name, part.plan.title, settings):
            settings, offload, said = way
            part = self._named(name, settings, offload=offload)
            if self._holds(part):
                break
        return settings, part, [*said, *_waits(part)]

    def _ways(
        self, name: str, title: str, settings: Settings
    ) -> Iterator[tuple[Settings, bool, list[str]]]:
        """Settings, whether weights wait, and what is said: exact ways first, lossy ones last."""
        assert isinstance(self.model, Rehearsing)
        said: list[str] = []
        lossy: list[Saving] = []
        for saving in self.model.savings(name, settings):
            if saving.is_lossy:
                lossy.append(saving)
                continue
            settings, said = saving.settings, [f"{title}: {saving.says}"]
            yield settings, False, said
        # A CPU's memory is the host's.
        may_wait = self.device.kind != "cpu"
        if may_wait:
            yield settings, True, said
        for saving in lossy:
            yield saving.settings, False, [*said, f"{title}: {saving.says}"]
        for saving in lossy if may_wait else ():
            yield saving.settings, True, [*said, f"{title}: {saving.says}"]

    def _holds(self, part: _Part) -> bool:
        return fits(part.plan.peak_bytes * self._copies(part), self.device) and not any(
            run.too_large for run in part.runs
        )

    def _hold(self, parts: Sequence[_Part]) -> bool:
        """Whether all fit, those that share a stage together."""
        copies = min((self._copies(part) for part in parts), default=1)
        together = fits(peak_of(part.plan for part in parts) * copies, self.device)
        return together and all(self._holds(part) for part in parts)

    def _copies(self, part: _Part) -> int:
        """How many ranks hold that component in this device's memory at once."""
        led = isinstance(self.model, Shared) and part.plan.name in self.model.led
        return 1 if led else self.copies

    def _named(
        self, name: str, settings: Settings, *, offload: bool = False, roughly: bool = False
    ) -> _Part:
        components = self.model.components(settings)
        component = next(each for each in components if each.name == name)
        return self._part(component, settings, offload=offload, roughly=roughly)

    def _part(
        self, component: Component, settings: Settings, *, offload: bool, roughly: bool = False
    ) -> _Part:
        chooser = self.chooser or Chooser(self.device)
        precision, notes = (
            choose(self.device, self.asked, component.needs, force=self.force)
            if component.has_precision is None
            else (component.has_precision, ())
        )
        tried = self._runs(component.name, settings, precision, roughly=roughly)
        runs = tuple(run for run in tried if isinstance(run, DryRun))
        weighed: tuple[Choice, ...] = ()
        # A pipeline's own call can't be tried part by part, so nothing is chosen for it.
        alone = [run for run in runs if not isinstance(run.rehearsal, JointRehearsal)]
        if component.has_precision is None and self.asked == "auto" and len(alone) == len(runs):
            dtype, weighed = chooser.dtype(component, precision, runs)
            if dtype != precision.compute:
                precision, notes = choose(self.device, dtype, component.needs, force=self.force)
                tried = self._runs(component.name, settings, precision, roughly=roughly)
                runs = tuple(run for run in tried if isinstance(run, DryRun))
                alone = list(runs)
        notes += tuple(not_followed(component.title, why) for why in tried if isinstance(why, str))
        choices = (*weighed, *chooser.choices(component.name, precision, alone))
        paths = used(choices) if alone or choices else None
        remedies = remedies_for(component.name, precision.parameters, self.remedies)
        resident = _resident_bytes(runs, precision) if offload and runs else None
        weights = weight_bytes(component.num_elements, precision, remedies)
        # A pipeline's parts are read by diffusers and transformers, whole.
        waits = weights + _frame_bytes(settings) if alone else 0
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
            offload=resident is not None,
            streams=resident is not None and waits > self.host_memory,
            resident_bytes=resident,
            remedies=remedies,
            paths=paths,
            choices=choices,
        )
        notes = (*notes, *told(component.title, choices, precision))
        for run in runs:
            notes = (*notes, *run.notes())
        return _Part(plan, runs, notes)

    def _runs(
        self, name: str, settings: Settings, precision: Precision, *, roughly: bool
    ) -> tuple[DryRun | str, ...]:
        """The dry runs of a component; why there is none in place of one that can't be had."""
        rehearsals = [each for each in self._rehearsals(settings) if each.component == name]
        return tuple(
            self._joint(each, settings, precision)
            if isinstance(each, JointRehearsal)
            else dry_run(each, precision, self.device)
            for each in rehearsals
            if not (roughly and isinstance(each, JointRehearsal))
        )

    def _joint(
        self, rehearsal: JointRehearsal, settings: Settings, precision: Precision
    ) -> DryRun | str:
        precisions = {
            each.name: choose(self.device, self.asked, each.needs, force=self.force)[0]
            for each in self.model.components(settings)
        }
        precisions[rehearsal.component] = precision
        return joint_dry_run(rehearsal, precisions, self.device)

    def _rehearsals(self, settings: Settings) -> Sequence[Rehearsal]:
        if self.team is not None and isinstance(self.model, Shared):
            return self.model.shared_rehearsals(settings, self.team, self.groups)
        return self.model.rehearsals(settings) if isinstance(self.model, Rehearsing) else ()

    def _working_bytes(
        self, component: Component, runs: Sequence[DryRun], precision: Precision
    ) -> int:
        """The peak of what its stages hold, or of a tensor on its way from the file."""
        if not runs:
            assert component.working_bytes is not None, "no rehearsal and no forecast"
            return component.working_bytes(num_bytes(precision.compute))
        loading = 0
        # What has the file's dtype is read straight into its place; the rest is cast on the way.
        if self.device.kind == "cpu" and num_bytes(precision.parameters) < _FILE_ELEMENT:
            loading = max(component.num_elements.values(), default=0) * _FILE_ELEMENT
        return max(loading, *(run.found.working_bytes for run in runs))

    def _host_bytes(self, plans: Sequence[ComponentPlan], settings: Settings) -> int:
        """What lies in the host's memory beside the device: offloaded weights, finished frames."""
        if self.device.kind == "cpu":
            return 0
        waiting: dict[str, int] = {}
        for plan in plans:
            if (plan.offload and not plan.streams) or plan.by_turns:
                waiting[plan.stage] = waiting.get(plan.stage, 0) + plan.weight_bytes
        return max(waiting.values(), default=0) + _frame_bytes(settings)


def _frame_bytes(settings: Settings) -> int:
    """Finished frames on the host: as floats while a piece is handed over, and as bytes."""
    return settings.num_frames * settings.height * settings.width * 3 * (4 + 1)


def _resident_bytes(runs: Sequence[DryRun], precision: Precision) -> int:
    from everyframe.families.offload import resident_bytes

    rehearsal = runs[0].rehearsal
    module = rehearsal.module()
    if isinstance(rehearsal, JointRehearsal):
        module = module[rehearsal.component]
    return resident_bytes(module, precision)


def _waits(part: _Part) -> list[str]:
    """What is said of weights that are not on the device."""
    if not part.plan.offload:
        return []
    where = "its weights wait in the host's memory and come to the device block by block"
    if part.plan.streams:
        where = (
            "its weights are read from their files block by block at every call, as the host's "
            "memory does not hold them"
        )
    return [f"{part.plan.title}: {where}"]


def _by_turns(parts: Sequence[_Part]) -> tuple[list[_Part], list[str]]:
    """Those that share a stage, one after the other on the device."""
    stages = [part.plan.stage for part in parts]
    shared = {stage for stage in stages if stages.count(stage) > 1}
    if not shared:
        return list(parts), []
    turned = [
        replace(part, plan=replace(part.plan, by_turns=True))
        if part.plan.stage in shared and not part.plan.offload
        else part
        for part in parts
    ]
    names = ", ".join(part.plan.title for part in turned if part.plan.by_turns)
    said = f"stage by stage: {names} come to the device one after the other, for their work alone"
    return turned, [f"{said}, and wait in the host's memory"]


def _in_order(rehearsals: Sequence[Rehearsal], parts: Sequence[_Part]) -> tuple[DryRun, ...]:
    """The dry runs in the order of the stages; a component may have several."""
    runs = {(run.rehearsal.stage, run.rehearsal.component): run for p in parts for run in p.runs}
    order = [(each.stage, each.component) for each in rehearsals]
    return tuple(runs[each] for each in order if each in runs)


def within(device: DeviceFacts, most: int | None) -> DeviceFacts:
    """The device with no more of its memory free than may be used."""
    if most is None or most >= device.free_memory:
        return device
    return replace(device, free_memory=most)
