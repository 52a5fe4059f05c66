"""Choose the precision of each component and make its dry runs in that precision.

The precision is what the device facts suggest if that is certified, and float32 otherwise. Looking
up the certificate needs a dry run first; in a pipeline, with all components of the call.
`everyframe.precision.policy` reads the facts; `choose_fast_paths.py` weighs the paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import (
    PACKED,
    ComponentPlan,
    FastPathChoice,
    Precision,
    Settings,
)
from everyframe.core.quality import PRODUCTS
from everyframe.core.request import Request
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.planning.dry_runs import DryRun, dry_run, not_followed
from everyframe.planning.fast_paths.choose_fast_paths import USED, FastPathChooser
from everyframe.precision.policy import FP8_CAPABILITY, choose
from everyframe.runtime.interface import Component, DryRunSpec, ModelSpec, ShardableSpec

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext

_Beside = Callable[[Settings], Mapping[str, Precision]]
"""The precision of every component, for a call in which several work."""


@dataclass(frozen=True)
class ComponentPrecision:
    """A component's precision, notes, weighed paths and dry runs.

    `notes` include calls that no dry run could follow.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[FastPathChoice, ...]
    runs: tuple[DryRun, ...]


@dataclass(frozen=True)
class PrecisionPlanner:
    """Chooses precisions of a model's components on a device.

    `asked` is the requested dtype. `parallel` is set if this is one rank of several.
    """

    model: ModelSpec
    device: DeviceFacts
    asked: str
    chooser: FastPathChooser
    parallel: ParallelContext | None = None
    force: bool = False

    def dry_run_calls(self, settings: Settings) -> Sequence[DryRunCall]:
        if not isinstance(self.model, DryRunSpec):
            return ()
        parallel = self.parallel if isinstance(self.model, ShardableSpec) else None
        return self.model.dry_run_calls(settings, parallel)

    def dry_run_calls_of(self, component: str, settings: Settings) -> list[DryRunCall]:
        return [each for each in self.dry_run_calls(settings) if each.component == component]

    def by_facts(self, component: Component, kind: str) -> tuple[Precision, tuple[str, ...]]:
        """Precision by device facts with weights in format `kind`, and notes."""
        if component.has_precision is not None:
            return component.has_precision, ()
        return self._in_dtype(component, self.asked, kind)

    def chosen(
        self, component: Component, settings: Settings, kind: str, *, roughly: bool = False
    ) -> ComponentPrecision:
        """Final precision with weights in format `kind`.

        With `roughly`, whole calls of a pipeline get no dry run, since that takes seconds.
        """
        found = self._weigh(component, settings, kind, roughly=roughly)
        precision, tried, choices = found.precision, found.tried, found.choices
        if tried is None:
            tried = self._try(component, settings, precision, self._all_weighed, roughly=roughly)
        runs = tuple(run for run in tried if isinstance(run, DryRun))
        whys = (not_followed(component.title, why) for why in tried if isinstance(why, str))
        if kind in PRODUCTS and not roughly:
            choices = (*choices, self.chooser.products(component.name, precision, runs))
            if choices[-1].verdict not in USED:
                precision = replace(precision, weight_dtype="")
        return ComponentPrecision(precision, (*found.notes, *whys), choices, runs)

    def _weigh(
        self, component: Component, settings: Settings, kind: str, *, roughly: bool = False
    ) -> _Weighed:
        """The precision by facts if certified, else float32."""
        precision, notes = self.by_facts(component, kind)
        tried = self._try(component, settings, precision, self._all_by_facts, roughly=roughly)
        runs = [run for run in tried if isinstance(run, DryRun)]
        # Without a dry run there is nothing to try a precision on.
        may_try = len(runs) == len(tried) and not (roughly and not runs)
        dtype, weighed = self.chooser.dtype(component, precision, runs, may_try=may_try)
        if dtype != precision.compute:
            return _Weighed(*self._in_dtype(component, dtype, kind), weighed)
        # Components beside it may have another precision than by facts.
        is_joint = any(len(run.precisions) > 1 for run in runs)
        return _Weighed(precision, notes, weighed, None if is_joint else tried)

    def _in_dtype(
        self, component: Component, dtype: str, kind: str
    ) -> tuple[Precision, tuple[str, ...]]:
        precision, notes = choose(self.device, dtype, component.needs, force=self.force)
        if not kind:
            return precision, notes
        # Modules too sensitive for half precision are so for 8 bits, whatever the rest is in.
        islands = precision.islands or component.needs.islands
        return replace(precision, islands=islands, weight_dtype=kind), notes

    def _try(
        self,
        component: Component,
        settings: Settings,
        precision: Precision,
        beside: _Beside,
        *,
        roughly: bool,
    ) -> tuple[DryRun | str, ...]:
        """Dry runs of a component; a text with the reason in place of each that fails."""
        found: list[DryRun | str] = []
        for each in self.dry_run_calls_of(component.name, settings):
            if each.is_foreign and roughly:
                continue
            others = beside(settings) if len(each.components) > 1 else {}
            together = {name: others[name] for name in each.components if name in others}
            found.append(dry_run(each, {**together, component.name: precision}, self.device))
        return tuple(found)

    def _all_by_facts(self, settings: Settings) -> Mapping[str, Precision]:
        """Precision of every component by facts; pipeline components stay unquantized."""
        return {each.name: self.by_facts(each, "")[0] for each in self.model.components(settings)}

    def _all_weighed(self, settings: Settings) -> Mapping[str, Precision]:
        components = self.model.components(settings)
        return {each.name: self._weigh(each, settings, "").precision for each in components}


class _Weighed(NamedTuple):
    """A precision, its notes, and the paths weighed for it.

    `tried` are the dry runs used for that, if the plan uses the same.
    """

    precision: Precision
    notes: tuple[str, ...]
    choices: tuple[FastPathChoice, ...]
    tried: tuple[DryRun | str, ...] | None = None


#: Relative error (norm) of a layer's result with quantized weights, for weights as trained, with
#: few large values per row (tests/precision/test_quantization.py).
ERRORS = {"int8": 0.01, "fp8": 0.03, "int8-dynamic": 0.01, "fp8-scaled": 0.04}

#: Format tried by default: the more accurate of the two; the other saves no more.
_OF_ITSELF = "int8"

#: Device types on which torch lacks the dtype.
_LACKS = {"fp8": ("mps",)}


@dataclass(frozen=True)
class QuantizationChoice:
    """Requested quantization: an option of the request, or `exact` by component."""

    asked: str = "none"
    exact: Mapping[str, str] | None = None

    def kinds(self, component: str) -> tuple[str, ...]:
        """Formats to try for a component, the most exact first; "" is unquantized."""
        if self.exact is not None:
            return (self.exact.get(component, ""),)
        by_itself = ("", PACKED, _OF_ITSELF)
        return {"auto": by_itself, "none": ("",)}.get(self.asked, (self.asked,))


#: No quantization.
WHOLE = QuantizationChoice()


def quantization_choice(request: Request, device: DeviceFacts) -> QuantizationChoice:
    """Quantization options of a request for that device.

    Raises:
        InputError: unknown format, or not available on that device.
    """
    wanted = {request.quantize, *(request.quantized or {}).values()} - {"auto", "none", ""}
    for kind in sorted(wanted):
        if kind not in (*ERRORS, PACKED):  # out of a record that anybody may have made
            known = " or ".join((*ERRORS, PACKED))
            raise InputError(f"weights are stored in {known}, not in {kind!r}")
        if kind == PACKED and device.kind != "cpu":
            raise InputError(
                f"GGUF weights stay in their blocks on the CPU only, not on {device.name}; without "
                "--quantize gguf they are widened as they are loaded"
            )
        if device.kind in _LACKS.get(kind, ()):
            raise InputError(f"{device.name} has no {kind}; give --quantize int8")
        if kind in PRODUCTS and not can_multiply(device, kind):
            needs = "a CPU or a CUDA card"
            if kind == "fp8-scaled":
                needs = "a CUDA card of compute capability 8.9 or later"
            raise InputError(
                f"{kind} needs {needs}, not {device.name}; give --quantize {PRODUCTS[kind]}, which "
                "stores the weights alone in 8 bits"
            )
    return QuantizationChoice(request.quantize, request.quantized)


def can_multiply(device: DeviceFacts, kind: str) -> bool:
    """Whether the device has products of that kind."""
    is_old = (device.capability or (0, 0)) < FP8_CAPABILITY
    return device.kind in CATALOGUE[kind].kinds and not (kind == "fp8-scaled" and is_old)


def check_effect(wanted: QuantizationChoice, title: str, parts: Sequence[ComponentPlan]) -> None:
    """Raise `InputError` if quantization was requested and no weight is quantized."""
    asked = wanted.exact is None and wanted.asked in (*ERRORS, PACKED)
    tried = {choice.path for part in parts for choice in part.choices}
    if asked and wanted.asked not in tried and not any(p.precision.weight_dtype for p in parts):
        raise InputError(
            f"quantize has no effect on {title}: it stores linear layers of models that Everyframe "
            "loads itself, of components that need not be in float32; gguf needs a GGUF file"
        )


def quantization_notes(
    title: str, precision: Precision, wanted: QuantizationChoice
) -> tuple[str, ...]:
    """Plan notes about a component with quantized weights."""
    if not precision.weight_dtype:
        return ()
    by_itself = wanted.exact is None and wanted.asked == "auto"
    if precision.weight_dtype == PACKED:
        return (
            f"{title}: weights of its linear layers stay in the blocks of their GGUF file and are "
            "widened for each product: the same bits in less memory, and more time",
        )
    if precision.weight_dtype in PRODUCTS:
        return (
            f"{title}: its linear layers are stored and multiplied in {precision.weight_dtype} "
            f"(lossy: a layer's result differs by about {ERRORS[precision.weight_dtype]:.0%})",
        )
    why = ", as nothing else makes it fit; --quantize none prevents it" if by_itself else ""
    return (
        f"{title}: weights of its linear layers are stored in {precision.weight_dtype} (lossy: a "
        f"layer's result differs by about {ERRORS[precision.weight_dtype]:.0%}{why})",
    )
