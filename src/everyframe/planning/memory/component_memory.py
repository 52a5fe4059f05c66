"""Plan one component at given settings: weight placement and memory.

Working memory is the peak over the dry runs of its stages. `component_precision.py` chooses the
precision and makes the dry runs; `memory_fit.py` varies the settings until everything fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from everyframe.core.facts import DeviceFacts
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import PACKED, ComponentPlan, Precision, Repair, Settings
from everyframe.core.quality import PRODUCTS
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.path_sizes import constant_bytes, feature_bytes, scratch_bytes
from everyframe.fast_paths.registry import BF16_DECODER
from everyframe.planning.component_precision import (
    WHOLE,
    PrecisionPlanner,
    QuantizationChoice,
    quantization_notes,
)
from everyframe.planning.dry_runs import DryRun
from everyframe.planning.fast_paths.choose_fast_paths import FastPathChooser, score_bytes, used
from everyframe.planning.fast_paths.fast_path_notes import fast_path_notes
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import WORTH, num_narrow, weight_bytes
from everyframe.runtime.interface import Component, ModelSpec, ShardableSpec
from everyframe.runtime.rank_shares import branch_groups
from everyframe.runtime.repair.repair_cache import repairs_for

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext

#: Maximum bytes per number in a checkpoint file, in practice.
_FILE_ELEMENT = 4


@dataclass(frozen=True)
class WeightPlacement:
    """Where the weights of a component are stored, and in what format.

    Attributes:
        offload: the weights are on the host.
        holders: number of ranks that shard the weights, unless they are offloaded.
        kind: one of `ComponentPlanner.kinds`; None is the first.
    """

    offload: bool = False
    holders: int = 1
    kind: str | None = None

    @staticmethod
    def of(plan: ComponentPlan) -> WeightPlacement:
        return WeightPlacement(
            plan.block_offload, plan.num_weight_shards, plan.precision.weight_dtype
        )


#: All weights on the device.
ON_DEVICE = WeightPlacement()


@dataclass(frozen=True)
class PlannedComponent:
    """One component at certain settings: its plan, its dry runs, and notes for a person.

    The dry runs' working memory has that of fast paths and of a lossy method in it.
    """

    plan: ComponentPlan
    runs: tuple[DryRun, ...]
    notes: tuple[str, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.stage_call.stage for run in self.runs))

    def in_stage(self, stage: str | None) -> tuple[int, bool]:
        """Peak bytes in that stage, or in any; and whether a tensor exceeds the device's limit."""
        runs = [run for run in self.runs if stage in (None, run.stage_call.stage)]
        too_large = any(run.is_too_large for run in runs)
        if stage is None or not runs:
            return self.plan.peak_bytes, too_large
        working = max(run.found.working_bytes for run in runs)
        return self.plan.on_device_bytes + working, too_large


@dataclass(frozen=True)
class ComponentPlanner:
    """Plans the components of a model on a device, one at a time.

    Attributes:
        model: the model's spec.
        device: the target device.
        asked: requested dtype.
        force: option of the request.
        host_memory: free bytes on the host beside the device.
        repairs: repairs applied from the start to components of that dtype.
        chooser: chooses fast paths; None expects every path that the device could have.
        quantization: which weights may be stored in eight bits.
        parallel: this rank's communicators, if it is one of several.
        holders: number of ranks that can shard the denoiser's weights.
        room: memory share of each of those ranks, if unequal.
        shards: whether they do shard them.
    """

    model: ModelSpec
    device: DeviceFacts
    asked: str
    force: bool
    host_memory: int
    repairs: tuple[Repair, ...] = ()
    chooser: FastPathChooser | None = None
    quantization: QuantizationChoice = WHOLE
    parallel: ParallelContext | None = None
    holders: int = 1
    room: tuple[float, ...] = ()
    shards: bool = False

    def of_rank(self, division: ParallelPlan, rank: int, settings: Settings) -> ComponentPlanner:
        """The same planner for one rank of several."""
        from everyframe.parallel.communicator import FakeCommunicator, ParallelContext

        group = division.active_groups[division.ranks[rank].group]
        video_group = FakeCommunicator(
            group.index(rank), [division.speeds[other] for other in group]
        )
        room = tuple(division.ranks[other].memory_share for other in group)
        inside = None
        groups = branch_groups(self.model, settings, division, group)
        if groups is not None:
            mine = groups.ranks[groups.number_of(video_group.rank)]
            inside = FakeCommunicator(
                mine.index(video_group.rank), video_group.weights[mine.start : mine.stop]
            )
        return replace(
            self,
            parallel=ParallelContext(
                video_group, video_group, division.cfg_degree, division.backend, branch_group=inside
            ),
            holders=holders_among(self.model, division),
            room=room if len(set(room)) > 1 else (),
        )

    def dry_run_calls(self, settings: Settings) -> Sequence[DryRunCall]:
        return self._precisions.dry_run_calls(settings)

    @property
    def _precisions(self) -> PrecisionPlanner:
        chooser = self.chooser or FastPathChooser(self.device)
        return PrecisionPlanner(
            self.model, self.device, self.asked, chooser, self.parallel, force=self.force
        )

    def plan_named(
        self,
        name: str,
        settings: Settings,
        where: WeightPlacement = ON_DEVICE,
        *,
        roughly: bool = False,
    ) -> PlannedComponent:
        """Plan the component of that name; see `plan`."""
        components = self.model.components(settings)
        component = next(each for each in components if each.name == name)
        return self.plan(component, settings, where, roughly=roughly)

    def plan(
        self,
        component: Component,
        settings: Settings,
        where: WeightPlacement = ON_DEVICE,
        *,
        roughly: bool = False,
    ) -> PlannedComponent:
        """Plan the component at these settings with that weight placement.

        With `roughly`, whole calls of a pipeline get no dry run, since that takes seconds.
        """
        kind = self._first_kind(component, settings) if where.kind is None else where.kind
        chosen = self._precisions.chosen(component, settings, kind, roughly=roughly)
        precision, notes, runs = chosen.precision, chosen.notes, chosen.runs
        more = self._precisions.chooser.choices(component.name, precision, runs)
        choices = (*chosen.choices, *more)
        paths = used(choices) if runs or len(choices) > len(chosen.choices) else None
        repairs = repairs_for(component.name, precision.parameters, self.repairs)
        if self.shards:
            where = replace(where, holders=max(where.holders, self.holders_of(component)))
        weights = self._weight_bytes(component, settings, precision, repairs)
        runs = tuple(self._with_paths(run, precision, settings, paths, weights) for run in runs)
        if BF16_DECODER in (paths or ()):  # for its check they stay in float32 too
            weights += 4 * num_narrow(component.num_elements, precision)
        # diffusers and transformers read a pipeline's components as a whole.
        is_ours = not any(run.stage_call.is_foreign for run in runs)
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
            working_bytes=self._working_bytes(component, runs, precision),
            **self._elsewhere(runs, precision, waits, where),
            repairs=repairs,
            fast_paths=paths,
            choices=choices,
        )
        notes += fast_path_notes(component.title, choices, precision)
        notes += tuple(quantization_notes(component.title, precision, self.quantization))
        return PlannedComponent(
            plan, runs, (*notes, *(note for run in runs for note in run.notes()))
        )

    def _with_paths(
        self,
        run: DryRun,
        precision: Precision,
        settings: Settings,
        paths: Sequence[str] | None,
        weights: int,
    ) -> DryRun:
        """The dry run with the memory of its fast paths and its lossy method at the peak."""
        products, threads = run.found.work.products, self._precisions.chooser.num_threads
        more = score_bytes((run,), paths)
        more += scratch_bytes((each for each, _ in products), paths or (), threads)
        if run.stage_call.denoises:
            more += constant_bytes(weights) if "cached-constants" in (paths or ()) else 0
            if settings.method is not None and settings.method.is_cache:
                more += feature_bytes(products, num_bytes(precision.compute))
        return replace(run, found=replace(run.found, working_bytes=run.found.working_bytes + more))

    def _elsewhere(
        self, runs: Sequence[DryRun], precision: Precision, waits: int, where: WeightPlacement
    ) -> dict[str, Any]:
        """Plan fields for weights off the device; empty if there are none.

        `waits` bytes would be on the host.
        """
        if not runs or not (where.offload or where.holders > 1):
            return {}
        return {
            "block_offload": where.offload,
            "from_disk": where.offload and waits > self.host_memory,
            "num_weight_shards": where.holders,
            "resident_bytes": self._resident_bytes(runs[0].stage_call, precision, where.holders),
        }

    def kinds(self, component: Component, settings: Settings) -> tuple[str, ...]:
        """Possible weight formats, the most exact first; "" is the weights' own dtype."""
        asked = self.quantization.kinds(component.name)
        # Modules made for float32 are the smaller part, and need its digits.
        if not any(asked) or component.has_precision or component.needs.prefers == "float32":
            return ("",)
        if asked[0] in PRODUCTS and not self._denoises(component, settings):
            return ("",)
        can_stay = bool(component.packed_bytes) and self.device.kind == "cpu"
        narrow = [kind for kind in asked if kind and (kind != PACKED or can_stay)]
        whole = self.weights_alone(component, settings, "") if narrow else 0
        worth = [
            kind for kind in narrow if self.weights_alone(component, settings, kind) < WORTH * whole
        ]
        return tuple(worth) if asked[0] and worth else ("", *worth)

    def _denoises(self, component: Component, settings: Settings) -> bool:
        """Whether it runs at every step."""
        calls = self._precisions.dry_run_calls_of(component.name, settings)
        return any(call.denoises for call in calls)

    def _first_kind(self, component: Component, settings: Settings) -> str:
        first = self.quantization.kinds(component.name)[0]
        return self.kinds(component, settings)[0] if first else first

    def weights_alone(self, component: Component, settings: Settings, kind: str) -> int:
        """Minimum bytes of its weights on this device, however little is computed at once."""
        precision, _ = self._precisions.by_facts(component, kind)
        holders = self.holders_of(component)
        if holders == 1:
            return self._weight_bytes(component, settings, precision)
        (call, *_) = self._precisions.dry_run_calls_of(component.name, settings)
        return self._resident_bytes(call, precision, holders)

    def _resident_bytes(self, stage_call: DryRunCall, precision: Precision, holders: int) -> int:
        """Maximum bytes on the device for weights that are copied block by block."""
        from everyframe.runtime.memory.offload import resident_bytes
        from everyframe.runtime.memory.weight_sharding import on_device_bytes

        if holders == 1:
            return resident_bytes(stage_call.module(), precision)
        if not self.room or self.parallel is None:
            return on_device_bytes(stage_call.module(), precision, [1.0] * holders)
        return on_device_bytes(
            stage_call.module(), precision, self.room, self.parallel.video_group.rank
        )

    def holders_of(self, component: Component) -> int:
        """How many ranks can shard its weights: those that call it together."""
        return self.holders if component.stage == "denoise" else 1

    def _weight_bytes(
        self,
        component: Component,
        settings: Settings,
        precision: Precision,
        repairs: Sequence[Repair] = (),
    ) -> int:
        """Bytes of its parameters, including scales of eight-bit weights."""
        count, found = component.num_elements, dict[str, int]()
        if precision.weight_dtype:
            found = _rows(self._precisions.dry_run_calls_of(component.name, settings), precision)
        if precision.weight_dtype != PACKED:
            return weight_bytes(count, precision, repairs, found)
        stays = {name: size for name, size in component.packed_bytes.items() if name in found}
        rest = {name: number for name, number in count.items() if name not in stays}
        return weight_bytes(rest, precision, repairs) + sum(stays.values())

    def _working_bytes(
        self, component: Component, runs: Sequence[DryRun], precision: Precision
    ) -> int:
        """Peak of its stages' working memory, or of a tensor being cast on load."""
        if not runs:
            assert component.working_bytes is not None, "no dry run and no forecast"
            return component.working_bytes(num_bytes(precision.compute))
        loading = 0
        # Weights of the file's dtype are read in place; others are cast on the way.
        is_cast = bool(precision.weight_dtype) or num_bytes(precision.parameters) < _FILE_ELEMENT
        if self.device.kind == "cpu" and is_cast:
            loading = max(component.num_elements.values(), default=0) * _FILE_ELEMENT
        return max(loading, *(run.found.working_bytes for run in runs))


def holders_among(model: ModelSpec, division: ParallelPlan) -> int:
    """How many ranks can shard the denoiser's weights: the size of the smallest video group."""
    is_collective = isinstance(model, ShardableSpec) and model.is_collective
    return min(map(len, division.groups)) if is_collective else 1


def frame_bytes(settings: Settings) -> int:
    """Bytes of finished frames on the host: float32 while a piece is passed on, and uint8."""
    return settings.num_frames * settings.height * settings.width * 3 * (4 + 1)


def _rows(stage_calls: Sequence[DryRunCall], precision: Precision) -> dict[str, int]:
    """Linear layers' weights of a component by name, with the number of scales of each."""
    from everyframe.precision.quantization import rows

    return rows(stage_calls[0].module(), precision) if stage_calls else {}
