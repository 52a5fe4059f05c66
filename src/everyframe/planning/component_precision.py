"""The precision of each component, and its dry runs in that precision.

It is what the facts of the device say, where that is certified; float32 elsewhere. To know whether
it is, a component has to be run dry first, and in a pipeline what works beside it, too. Not here:
what speaks for a path or against it (`choose_fast_paths.py`), and what the facts say
(`everyframe.precision.policy`). Read next: `dry_runs.py`,
`everyframe.runtime.interface.DryRunSpec`; `component_memory.py`, which asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, FastPathChoice, Precision, Settings
from everyframe.core.request import Request
from everyframe.planning.choose_fast_paths import FastPathChooser
from everyframe.planning.dry_runs import DryRun, dry_run, joint_dry_run, not_followed
from everyframe.precision.policy import choose
from everyframe.runtime.interface import (
    Component,
    DryRunCall,
    DryRunSpec,
    JointDryRunCall,
    ModelSpec,
    ShardableSpec,
)

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext

_Beside = Callable[[Settings], Mapping[str, Precision]]
"""The precision of every component, for a call in which several work."""


@dataclass(frozen=True)
class ComponentPrecision:
    """A component's precision, what is said of it, the paths that were weighed, and its dry runs.

    `notes` also tell of calls that no dry run could follow.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[FastPathChoice, ...]
    runs: tuple[DryRun, ...]


@dataclass(frozen=True)
class PrecisionPlanner:
    """Those of a model's components on a device; `asked` is the dtype of the request.

    With `teams`, it is one rank of theirs.
    """

    model: ModelSpec
    device: DeviceFacts
    asked: str
    chooser: FastPathChooser
    teams: ParallelContext | None = None
    force: bool = False

    def rehearsals(self, settings: Settings) -> Sequence[DryRunCall]:
        """The calls that are run dry, in the order of the stages."""
        if self.teams is not None and isinstance(self.model, ShardableSpec):
            return self.model.shared_rehearsals(settings, self.teams)
        return self.model.rehearsals(settings) if isinstance(self.model, DryRunSpec) else ()

    def rehearsals_of(self, component: str, settings: Settings) -> list[DryRunCall]:
        """Those of one component."""
        return [each for each in self.rehearsals(settings) if each.component == component]

    def by_facts(self, component: Component, kind: str) -> tuple[Precision, tuple[str, ...]]:
        """What the facts of the device say, with its weights in `kind`, and notes."""
        if component.has_precision is not None:
            return component.has_precision, ()
        return self._in_dtype(component, self.asked, kind)

    def chosen(
        self, component: Component, settings: Settings, kind: str, *, roughly: bool = False
    ) -> ComponentPrecision:
        """What it runs in, with its weights in `kind`.

        With `roughly` whole calls of a pipeline, which take seconds, are not run dry.
        """
        found = self._weighed(component, settings, kind, roughly=roughly)
        precision, tried = found.precision, found.tried
        if tried is None:
            tried = self._tried(component, settings, precision, self._all_weighed, roughly=roughly)
        runs = tuple(run for run in tried if isinstance(run, DryRun))
        whys = (not_followed(component.title, why) for why in tried if isinstance(why, str))
        return ComponentPrecision(precision, (*found.notes, *whys), found.choices, runs)

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
        is_joint = any(isinstance(run.rehearsal, JointDryRunCall) for run in runs)
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
            if not isinstance(each, JointDryRunCall):
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
    choices: tuple[FastPathChoice, ...]
    tried: tuple[DryRun | str, ...] | None = None


#: How far the result of a layer is from that with all weights whole, its norm over the other's; of
#: weights as they are trained, few of a row being large (tests/precision/test_quantization.py).
ERRORS = {"int8": 0.01, "fp8": 0.03}

#: What is tried of itself: the closer of the two, of which the other has no more to give.
_OF_ITSELF = "int8"

#: Where torch has no such dtype at all.
_LACKS = {"fp8": ("mps",)}

#: A component is worth it whose weights take so much less.
WORTH = 0.9


@dataclass(frozen=True)
class QuantizationChoice:
    """What is wanted: ``auto``, ``none``, ``int8`` or ``fp8``, or `exact`, by component."""

    asked: str = "none"
    exact: Mapping[str, str] | None = None

    def kinds(self, component: str) -> tuple[str, ...]:
        """What to try for a component, the most exact first; "" is weights as they are."""
        if self.exact is not None:
            return (self.exact.get(component, ""),)
        return {"auto": ("", _OF_ITSELF), "none": ("",)}.get(self.asked, (self.asked,))


#: All weights as they are.
WHOLE = QuantizationChoice()


def quantising_of(request: Request, device: DeviceFacts) -> QuantizationChoice:
    """The wishes of a request for that device.

    Raises:
        InputError: there is no such kind, or not on that device.
    """
    wanted = {request.quantize, *(request.quantized or {}).values()} - {"auto", "none", ""}
    for kind in sorted(wanted):
        if kind not in ERRORS:  # out of a record that anybody may have made
            raise InputError(f"weights are kept in {' or '.join(ERRORS)}, and not in {kind!r}")
        if device.kind in _LACKS.get(kind, ()):
            raise InputError(f"{device.name} has no {kind}; give --quantize int8")
    return QuantizationChoice(request.quantize, request.quantized)


def check_effect(wanted: QuantizationChoice, title: str, parts: Sequence[ComponentPlan]) -> None:
    """Raise `InputError` where weights were to be kept in eight bits and none are."""
    asked = wanted.exact is None and wanted.asked in ERRORS
    if asked and not any(part.precision.weights for part in parts):
        raise InputError(
            f"quantize has no effect on {title}: it is for linear layers of parts that are not "
            "made for float32, in models that are loaded here (not by a diffusers pipeline)"
        )


def quantization_notes(
    title: str, precision: Precision, wanted: QuantizationChoice
) -> tuple[str, ...]:
    """What a plan says of a component that keeps its weights so."""
    if not precision.weights:
        return ()
    by_itself = wanted.exact is None and wanted.asked == "auto"
    why = ", as it fits no other way; --quantize none refuses" if by_itself else ""
    return (
        f"{title}: weights of its linear layers are kept in {precision.weights} (lossy: a layer's "
        f"result differs by about {ERRORS[precision.weights]:.0%}{why})",
    )
