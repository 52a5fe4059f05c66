"""Fit a video into available memory, and find the largest video that fits.

A component that needs too much gets as few memory fallbacks as suffice, in the order of
`runtime/memory/memory_fallbacks.py`. Stages are always loaded one at a time; components that a
stage needs together take turns on the device if they don't fit side by side. Memory grows with
each side of the video and falls with each fallback, so both searches bisect.
`component_memory.py` computes what a component needs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everyframe.core.bytes import fits, share_of
from everyframe.core.facts import DeviceFacts
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import ComponentPlan, Settings, peak_of
from everyframe.dry_run.call import DryRunCall
from everyframe.planning.dry_runs import DryRun
from everyframe.planning.memory.component_memory import (
    ComponentPlanner,
    PlannedComponent,
    WeightPlacement,
    frame_bytes,
)
from everyframe.planning.memory.largest_video import largest_fit
from everyframe.planning.parallelism import StepCost
from everyframe.precision.dtypes import num_bytes
from everyframe.runtime.interface import Component, DryRunSpec, ModelSpec, ShardableSpec
from everyframe.runtime.memory.memory_fallbacks import (
    OFFLOADED,
    MemoryFallback,
    memory_fallbacks,
    sharding_note,
)

_FAR_TOO_LARGE = 8.0
"""Ratio of needed to available memory that all fallbacks together rarely bring down to 1."""


@dataclass(frozen=True)
class FitResult:
    """Settings and components as they will run.

    `changes` are notes on what was changed to make them fit, and `fits` whether that was enough.
    `runs` are in the order of the stages; `host_bytes` are in host memory beside the device.
    """

    settings: Settings
    components: tuple[ComponentPlan, ...]
    runs: tuple[DryRun, ...]
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    host_bytes: int
    fits: bool


@dataclass(frozen=True)
class MemoryFit:
    """Fit the components of a model on a device whose memory `copies` ranks share.

    `fit` answers for given settings; `largest` finds smaller ones that fit. `lead` is the device of
    the first rank, if different: components that only that rank loads must fit there, beside its
    portion of the steps, which is `lead_share` times this rank's.
    """

    planner: ComponentPlanner
    copies: int = 1
    lead: DeviceFacts | None = None
    lead_share: float = 1.0

    @property
    def model(self) -> ModelSpec:
        return self.planner.model

    @property
    def device(self) -> DeviceFacts:
        """The device, limited to the memory that may be used."""
        return self.planner.device

    @property
    def host_memory(self) -> int:
        return self.planner.host_memory

    def fit(self, settings: Settings) -> FitResult:
        """Plan the components at these settings, with the memory fallbacks that each needs."""
        changes: list[str] = []
        parts: list[PlannedComponent] = []
        for component in self.model.components(settings):
            settings, part, notes = self._apply_fallbacks(component, settings)
            changes += notes
            parts.append(part)
        if changes:
            # A saving of one component may affect another.
            where = {part.plan.name: WeightPlacement.of(part.plan) for part in parts}
            parts = [
                self.planner.plan(each, settings, where[each.name])
                for each in self.model.components(settings)
            ]
        if not self._fit_together(parts) and self.device.kind == "cpu":
            parts = self._narrow(parts, settings)
        elif not self._fit_together(parts):
            parts, notes = _take_turns(parts)
            changes += notes
        plans = tuple(part.plan for part in parts)
        host = self._host_bytes(plans, settings)
        return FitResult(
            settings=settings,
            components=plans,
            runs=_in_order(self.planner.dry_run_calls(settings), parts),
            changes=tuple(changes),
            notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            host_bytes=host,
            fits=self._fit_together(parts) and host <= self.host_memory,
        )

    def _narrow(
        self, parts: Sequence[PlannedComponent], settings: Settings
    ) -> list[PlannedComponent]:
        """Components with weights in a narrower form, until those of one stage fit together.

        The most exact form comes first, and the largest component. Unchanged if nothing suffices.
        """
        found = {part.plan.name: part for part in parts}
        components = sorted(
            self.model.components(settings), key=lambda each: -found[each.name].plan.weight_bytes
        )
        kinds = {each.name: self.planner.kinds(each, settings) for each in components}
        for kind in self.planner.quantization.kinds("")[1:]:
            for each in components:
                if kind in kinds[each.name][1:]:
                    found[each.name] = self.planner.plan(each, settings, WeightPlacement(kind=kind))
                    if self._fit_together([*found.values()]):
                        return [*found.values()]
        return list(parts)

    def certified_alone(self) -> MemoryFit:
        """The same without fast paths that are only expected."""
        chooser = self.planner.chooser
        assert chooser is not None, "nothing is chosen"
        return replace(self, planner=replace(self.planner, chooser=replace(chooser, expects=False)))

    def of_ranks(self, division: ParallelPlan | None, settings: Settings) -> MemoryFit:
        """The fit for the rank with the most work."""
        if division is None:
            return self
        heaviest = max(division.ranks, key=lambda rank: max(rank.token_share, rank.attention_share))
        return self.of_rank(division, division.ranks.index(heaviest), settings, self.device)

    def of_rank(
        self,
        division: ParallelPlan,
        rank: int,
        settings: Settings,
        device: DeviceFacts,
        lead: DeviceFacts | None = None,
    ) -> MemoryFit:
        """The fit for that rank on `device`, in the precision that all ranks share."""
        copies = sum(each.is_active for each in division.ranks) if device.kind == "cpu" else 1
        mine = replace(self.device, memory=device.memory, free_memory=device.free_memory)
        planner = replace(self.planner.of_rank(division, rank, settings), device=mine)
        first, here = (division.ranks[each].token_share for each in (0, rank))
        return MemoryFit(planner, copies, lead, first / here if here else 1.0)

    def effort(self, settings: Settings) -> StepCost:
        """Cost of one step of a video on one device, for comparing divisions."""
        if not isinstance(self.model, ShardableSpec):
            return StepCost(1.0, 1)
        step = next(each for each in self.planner.dry_run_calls(settings) if each.denoises)
        part = self.planner.plan_named(step.component, settings)
        run = next((each for each in part.runs if each.stage_call.denoises), None)
        if run is None:  # no dry run can follow it there, so bytes alone are weighed
            return StepCost(1.0, num_bytes(part.plan.precision.compute))
        work = run.found.work
        attention = sum(n for product, n in work.products if product.kind == "attention")
        return StepCost(work.operations, num_bytes(part.plan.precision.compute), attention)

    def largest(self, settings: Settings) -> FitResult | None:
        """The largest smaller video that fits, or None."""
        # Weights are the same at every size.
        if any(self.weights_exceed(each, settings) for each in self.model.components(settings)):
            return None
        return largest_fit(self.model.smaller(settings), self._can_fit, self.fit)

    def weights_exceed(
        self, component: Component, settings: Settings, kind: str | None = None
    ) -> bool:
        """Whether the weights alone are too large and can't be offloaded, since a CPU is the host.

        In any weight format, unless `kind` names one.
        """
        kind = self.planner.kinds(component, settings)[-1] if kind is None else kind
        alone = self.planner.weights_alone(component, settings, kind)
        return self.device.kind == "cpu" and not fits(
            alone * self.copies_of(component.name), self.device
        )

    def _can_fit(self, settings: Settings) -> bool:
        """Whether it fits with all fallbacks, by a rough look."""
        parts: list[PlannedComponent] = []
        for component in self.model.components(settings):
            done = self._fallbacks(component, settings)
            least = done[-1].settings if done else settings
            where = _placement(done, WeightPlacement(kind=self.planner.kinds(component, least)[-1]))
            # Whole pipeline calls would take minutes for all sizes tried here.
            parts.append(self.planner.plan_named(component.name, least, where, roughly=True))
            if not self._fits(parts[-1]):
                return False
        # Components of one stage may fit alone and not together.
        return self._fit_together(parts)

    def _apply_fallbacks(
        self, component: Component, settings: Settings
    ) -> tuple[Settings, PlannedComponent, list[str]]:
        """The fewest fallbacks with which that component fits, or all, which need the least.

        Weights are quantized to eight bits only if nothing else suffices.
        """
        first = self._fit_as(component, settings, None)
        if self._fits(first[1]):
            return first
        others = self.planner.kinds(component, settings)[1:]
        found = (self._fit_as(component, settings, kind) for kind in others)
        return next((each for each in found if self._fits(each[1])), first)

    def _fit_as(
        self, component: Component, settings: Settings, kind: str | None
    ) -> tuple[Settings, PlannedComponent, list[str]]:
        part = self.planner.plan(component, settings, WeightPlacement(kind=kind))
        taken: list[MemoryFallback] = []
        if not self.weights_exceed(component, settings, part.plan.precision.weight_dtype):
            # Fallbacks are chosen per stage: one that helps elsewhere is no use here.
            for stage in part.stages or (None,):
                if not self._fits(part, stage):
                    done, part = self._fit_in_stage(component, stage, part, settings)
                    taken += done
                    settings = taken[-1].settings if taken else settings
        return settings, part, [*_fallback_notes(component, taken), *_placement_notes(part.plan)]

    def _fit_in_stage(
        self, component: Component, stage: str | None, part: PlannedComponent, settings: Settings
    ) -> tuple[list[MemoryFallback], PlannedComponent]:
        """The fewest fallbacks with which the component fits in that stage, or all of them."""
        before, done = WeightPlacement.of(part.plan), self._fallbacks(component, settings, stage)

        def after(number: int, *, moves: bool = True) -> PlannedComponent:
            where = _placement(done[:number] if moves else (), before)
            return self.planner.plan_named(component.name, done[number - 1].settings, where)

        def is_enough(number: int) -> bool:
            return self._fits(after(number), stage)

        taken = len(done)
        # If it is far too large, all fallbacks together are tried first; they rarely suffice.
        if done and (self._memory_ratio(part, stage) <= _FAR_TOO_LARGE or is_enough(taken)):
            taken = 1 + bisect_left(range(1, len(done)), True, key=is_enough)
        if not taken:
            return [], part
        part = after(taken)
        # After a lossy fallback, moved weights may fit in place again.
        if done[taken - 1].is_lossy and (
            part.plan.block_offload or part.plan.num_weight_shards > 1
        ):
            stays = after(taken, moves=False)
            part = stays if self._fits(stays, stage) else part
        return done[:taken], part

    def _fallbacks(
        self, component: Component, settings: Settings, stage: str | None = None
    ) -> list[MemoryFallback]:
        if not isinstance(self.model, DryRunSpec):
            return []
        holders = self.planner.holders_of(component)
        # Requested weight sharding is kept.
        is_asked = self.planner.shards and holders > 1
        return list(
            memory_fallbacks(
                [component.name],
                settings,
                self.model.savings,
                may_wait=self.device.kind != "cpu" and not is_asked,
                stage=stage,
                holders=1 if is_asked else holders,
            )
        )

    def _fits(self, component: PlannedComponent, stage: str | None = None) -> bool:
        """Whether it fits in that stage, or in all of them."""
        return self._memory_ratio(component, stage) <= 1

    def _memory_ratio(self, component: PlannedComponent, stage: str | None = None) -> float:
        """Required over available memory, for one stage or the worst stage.

        Infinite if a tensor exceeds what the device can address.
        """
        name = component.plan.name
        where = self.lead if self.lead is not None and self._is_led(name) else self.device
        peak, too_large = component.in_stage(stage)
        return math.inf if too_large else share_of(peak * self.copies_of(name), where)

    def _fit_together(self, parts: Sequence[PlannedComponent]) -> bool:
        """Whether all fit, counting components of one stage together."""
        plans = [part.plan for part in parts]
        here = [plan for plan in plans if self.lead is None or not self._is_led(plan.name)]
        copies = {plan.name: self.copies_of(plan.name) for plan in plans}
        together = not here or fits(peak_of(here, copies), self.device)
        if self.lead is not None:  # where what it alone loads lies beside its part of the rest
            together = together and fits(peak_of(map(self._on_lead, parts)), self.lead)
        return together and all(self._fits(part) for part in parts)

    def _on_lead(self, component: PlannedComponent) -> ComponentPlan:
        """The component on the first rank, whose portion of the steps differs."""
        plan = component.plan
        if not any(run.stage_call.denoises for run in component.runs):
            return plan
        return replace(plan, working_bytes=int(plan.working_bytes * self.lead_share))

    def copies_of(self, name: str) -> int:
        """How many ranks store that component in this device's memory at once."""
        return 1 if self._is_led(name) else self.copies

    def _is_led(self, name: str) -> bool:
        """Whether only the first of all ranks loads it."""
        return isinstance(self.model, ShardableSpec) and name in self.model.lead_rank_components

    def _host_bytes(self, plans: Sequence[ComponentPlan], settings: Settings) -> int:
        """Bytes in host memory beside the device: offloaded weights, finished frames."""
        if self.device.kind == "cpu":
            return 0
        waiting: dict[str, int] = {}
        for plan in plans:
            if (plan.block_offload and not plan.from_disk) or plan.model_offload:
                waiting[plan.stage] = waiting.get(plan.stage, 0) + plan.weight_bytes
        return max(waiting.values(), default=0) + frame_bytes(settings)


def _fallback_notes(component: Component, done: Sequence[MemoryFallback]) -> list[str]:
    """Notes about the fallbacks; each implies the earlier ones of its kind."""
    kinds = {(each.is_lossy, each.stage): each.message for each in done if not each.moves_weights}
    return [f"{component.title}: {message}" for message in kinds.values()]


def _placement(done: Sequence[MemoryFallback], before: WeightPlacement) -> WeightPlacement:
    """Weight placement after these fallbacks; offloaded weights are not sharded too."""
    if before.offload or any(each.block_offload for each in done):
        return replace(before, offload=True, holders=1)
    holders = [before.holders, *(each.num_weight_shards for each in done)]
    return replace(before, holders=max(holders))


def _placement_notes(plan: ComponentPlan) -> list[str]:
    if plan.num_weight_shards > 1:
        return [f"{plan.title}: {sharding_note(plan.num_weight_shards)}"]
    if plan.from_disk:
        return [
            f"{plan.title}: disk offload: weights are read from their files block by block at "
            "every call, as host memory does not hold them"
        ]
    return [f"{plan.title}: {OFFLOADED}"] if plan.block_offload else []


def _take_turns(parts: Sequence[PlannedComponent]) -> tuple[list[PlannedComponent], list[str]]:
    """Let components of one stage take turns on the device; returns them and a note."""
    stages = [part.plan.stage for part in parts]
    shared = {stage for stage in stages if stages.count(stage) > 1}
    if not shared:
        return list(parts), []
    turned = [
        replace(part, plan=replace(part.plan, model_offload=True))
        if part.plan.stage in shared
        and not part.plan.block_offload
        and part.plan.num_weight_shards == 1
        else part
        for part in parts
    ]
    names = ", ".join(part.plan.title for part in turned if part.plan.model_offload)
    note = f"stage by stage: {names} are on the device one at a time, each only while it computes"
    return turned, [f"{note}; the others stay in host memory"]


def _in_order(
    stage_calls: Sequence[DryRunCall], parts: Sequence[PlannedComponent]
) -> tuple[DryRun, ...]:
    """Dry runs in the order of the stages; a component may have several."""
    runs = {(run.stage_call.stage, run.stage_call.component): run for p in parts for run in p.runs}
    order = [(each.stage, each.component) for each in stage_calls]
    return tuple(runs[each] for each in order if each in runs)


def with_memory_limit(device: DeviceFacts, most: int | None) -> DeviceFacts:
    """The device with its free memory limited to what may be used."""
    if most is None or most >= device.free_memory:
        return device
    return replace(device, free_memory=most)
