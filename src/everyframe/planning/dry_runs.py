"""Dry-run a plan: call each stage's component on meta tensors and record what it needs.

Finds precision clashes, peak memory and work of every stage, for the plan's precision and device,
which need not be this machine's. Calls of equal sizes run once per process. Results are cached on
disk until software changes, and those of a pipeline for its files and one prompt. The executor is
`everyframe.dry_run.executor`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import itemgetter
from typing import Any, TypeVar, cast

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.core.plan import ComponentPlan, Plan, Precision, StagePlan
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.result import (
    DryRunResult,
    DryRunResults,
    Work,
    results_from_json,
    results_to_json,
)
from everyframe.fast_paths.certification.target import TargetCall
from everyframe.fast_paths.registry import CATALOGUE, OF_LAYERS, kernel_used
from everyframe.precision.dtypes import num_bytes

#: Bytes per second of offloaded weights over the bus (PCIe 4 at half its peak).
_BUS = 12e9

_Found = TypeVar("_Found")

_LOCK = threading.Lock()
_DONE: dict[Any, Any] = {}
_MAX_DONE = 512

#: Saved calls of pipelines, each of some 100 kB; one for every prompt.
_MAX_PIPELINE_RUNS = 64


@dataclass(frozen=True)
class DryRun:
    """The dry run of one stage and its findings.

    Attributes:
        stage_call: the call.
        found: its result.
        precisions: of all components in the call.
        made: resulting (frames, height, width) of a pipeline's call, if known.
    """

    stage_call: DryRunCall
    found: DryRunResult
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    made: tuple[int, int, int] | None = None

    @property
    def key(self) -> Hashable:
        """Identity of the computation, for certificates: calls of equal sizes are equal.

        A pipeline's call depends on the words of the prompt, so its key is what was counted.
        """
        if self.stage_call.is_foreign:
            return (self.stage_call.model, self.found.work.products)
        return (self.stage_call.key, self.stage_call.component)

    def call(self) -> TargetCall:
        """The same call in a form that a separate process can make."""
        return TargetCall(self.stage_call, self.precisions)

    def has_place(self, path: str, *, is_quantized: bool) -> bool:
        """Whether that fast path applies to the component; see `fast_paths.apply.applies_to`.

        The linear layers of a component that `is_quantized` are swapped already.
        """
        return path in self._places() and not (is_quantized and path in OF_LAYERS)

    def _places(self) -> Sequence[str]:
        """The fast paths that apply to the plain component: one file for all of them."""

        def look() -> Sequence[str]:
            from everyframe.fast_paths.apply import applies_to

            module = self.stage_call.module()
            return [path for path in CATALOGUE if applies_to(path, module)]

        key = (self.stage_call.key, self.stage_call.component, "places", *_torchs_switches())
        if self.stage_call.is_foreign:
            return _once(key, look)
        file = CacheFile("fast_path_places", repr(key))
        return _once(key, lambda: _reuse(file, look, list, _names))

    @property
    def is_too_large(self) -> bool:
        """Whether a tensor exceeds what the device can address; smaller pieces may fix that."""
        return any(finding.kind == "too large" for finding in self.found.findings)

    def clashes(self) -> list[str]:
        """Findings that would stop the run, as component and module."""
        fatal = [finding for finding in self.found.findings if finding.is_fatal]
        return [f"{self.stage_call.component}: {finding}" for finding in fatal]

    def notes(self) -> list[str]:
        """What costs time or accuracy: one sentence per kind, with its first place."""
        kinds: dict[str, list[Any]] = {}
        for finding in self.found.findings:
            if not finding.is_fatal:
                kinds.setdefault(finding.kind, []).append(finding)
        return [
            f"{self.stage_call.component}, {self.stage_call.stage}: {kind} in {len(places)} places "
            f"or more, the first is {places[0]}"
            for kind, places in kinds.items()
        ]


def dry_run(
    stage_call: DryRunCall, precisions: Mapping[str, Precision], device: DeviceFacts
) -> DryRun | str:
    """Dry-run a call with its components in these precisions under the rules of that device.

    Returns the reason if no dry run can follow foreign code to its component, or an empty text if
    the call doesn't need it.
    """

    switches = _torchs_switches()

    def run() -> DryRunResults:
        from everyframe.dry_run import executor
        from everyframe.runtime.components.meta_init import BUILD_LOCK

        with BUILD_LOCK:
            before = _torchs_switches()
            found = executor.dry_run(stage_call, precisions, device)
        if not before == _torchs_switches() == switches:
            raise _SwitchedError(found)
        return found

    precision_items = sorted(precisions.items(), key=itemgetter(0))
    key = (stage_call.key, *precision_items, device.kind_only(), *switches)

    def look() -> DryRunResults:
        if stage_call.is_foreign:
            return _saved_of_pipeline(stage_call, key, run)
        return _reuse(CacheFile("dry_runs", repr(key)), run, results_to_json, results_from_json)

    try:
        results = _once(key, look)
    except _SwitchedError as switched:
        results = switched.results
    found = results.found.get(stage_call.component)
    if found is None:
        return results.stopped if results.at == stage_call.component else ""
    made = results.returned if stage_call.is_foreign else None
    return DryRun(stage_call, found, precisions, cast("tuple[int, int, int] | None", made))


def not_followed(title: str, why: str) -> str:
    """Note about a component whose pipeline call no dry run can complete."""
    reason = f" ({why})" if why else ""
    return (
        f"{title}: no dry run can follow the pipeline there{reason}; its memory is forecast "
        "roughly, its time not, and clashes in it are found by the run alone"
    )


class _SwitchedError(Exception):
    """Another thread set torch's switches meanwhile, so that the results are stored nowhere."""

    def __init__(self, results: DryRunResults) -> None:
        super().__init__()
        self.results = results


def _torchs_switches() -> tuple[str, ...]:
    """What of torch is set otherwise than by default, and changes results: for keys.

    The dtype of what is made without one, and the attention kernels that are switched off.
    """
    if "torch" not in sys.modules:  # what was found before needs no torch
        return ()
    from torch import float32, get_default_dtype
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    dtype = [] if get_default_dtype() == float32 else [str(get_default_dtype())]
    allowed = _cur_sdpa_kernel_backends()
    off = {name for name, each in SDPBackend.__members__.items() if each not in allowed}
    return (*dtype, *sorted(off - {"ERROR"}))


def _once(key: Any, run: Callable[[], _Found]) -> _Found:
    with _LOCK:  # modules are shared
        if key not in _DONE:
            while len(_DONE) >= _MAX_DONE:
                del _DONE[next(iter(_DONE))]
            _DONE[key] = run()
        found: _Found = _DONE[key]
        return found


def _saved_of_pipeline(
    call: DryRunCall, key: Any, run: Callable[[], DryRunResults]
) -> DryRunResults:
    """The results for these files of a pipeline, and for this prompt."""
    if not call.files:
        return run()
    file = CacheFile("pipeline_dry_runs", repr((key, call.files)), _MAX_PIPELINE_RUNS)
    return _reuse(file, run, results_to_json, results_from_json)


def _reuse(
    file: CacheFile,
    run: Callable[[], _Found],
    to_json: Callable[[_Found], Any],
    from_json: Callable[[Any], _Found | None],
) -> _Found:
    """The result that an earlier process cached, or a new one."""
    if " at 0x" in file.key:  # something that is known by its place in this process's memory
        return run()
    saved = from_json(file.read())
    if saved is not None:
        return saved
    found = run()
    # Not saved: results that don't fit JSON.
    if from_json(json.loads(json.dumps(to_json(found)))) == found:
        file.write(to_json(found))
    return found


def _names(data: Any) -> Sequence[str] | None:
    is_valid = isinstance(data, list) and all(isinstance(name, str) for name in data)
    return data if is_valid else None


def stage_plan(run: DryRun, component: ComponentPlan, rates: Throughput | None) -> StagePlan:
    """The plan of a stage; with `rates`, including its time."""
    work = run.found.work
    return StagePlan(
        name=run.stage_call.stage,
        component=component.name,
        working_bytes=run.found.working_bytes,
        num_operations=run.found.num_operations,
        operations=work.operations * run.stage_call.num_calls,
        seconds=None if rates is None else _seconds(run, component, rates),
    )


def _seconds(run: DryRun, component: ComponentPlan, rates: Throughput) -> float:
    call = call_seconds(run.found.work, rates, component.fast_paths)
    # 8-bit weights are quantized from the file at each read.
    precision, load = component.precision, component.weight_bytes / rates.load
    if precision.weight_dtype:
        load = max(load, component.num_parameters * num_bytes(precision.compute) / rates.load)
    if component.block_offload:
        # The next block loads while one computes: the longer time counts. Each pass loads all.
        once = load if component.from_disk else component.weight_bytes / _BUS
        call = max(call, once * run.found.num_passes)
    return load + call * run.stage_call.num_calls


def call_seconds(work: Work, rates: Throughput, paths: Sequence[str] | None = None) -> float:
    """Seconds of one call: products at their rates, everything else at memory bandwidth.

    `paths` are the fast paths in use; without an attention kernel, attention is computed plainly.
    None stands for torch's own choice.
    """
    measured = dict(rates.measured)
    alike: dict[tuple[str, str], list[float]] = {}
    for product, rate in rates.measured:
        alike.setdefault((product.kind, product.dtype), []).append(rate)
    seconds = work.moved_bytes / rates.memory + work.num_kernels * rates.launch
    if rates.mapping is not None:
        seconds += work.mapped_bytes / rates.mapping
    for product, operations in _by_kernels(work, paths):
        tried = measured.get(product) or _mean(alike.get((product.kind, product.dtype), ()))
        seconds += operations / (tried or rates.product(product.dtype))
    return seconds


def _mean(rates: Sequence[float]) -> float | None:
    return sum(rates) / len(rates) if rates else None


def _by_kernels(work: Work, paths: Sequence[str] | None) -> Iterator[tuple[OpShape, float]]:
    """The products, each attention with the kernel that computes it."""
    kernel = None if paths is None else kernel_used(paths)
    for product, operations in work.products:
        if kernel is not None and product.kind == "attention":
            product = replace(product, parameters=(*product.parameters, kernel))
        yield product, operations


def heaviest(
    runs: Sequence[DryRun], most: int, paths: Mapping[str, Sequence[str] | None] | None = None
) -> list[OpShape]:
    """The products that take most of the plan's time, at least one of every kind and dtype.

    `paths` are the fast paths of each component; see `call_seconds`.
    """
    total: dict[OpShape, float] = {}
    for run in runs:
        used = (paths or {}).get(run.stage_call.component)
        for product, operations in _by_kernels(run.found.work, used):
            total[product] = total.get(product, 0.0) + operations * run.stage_call.num_calls
    ranked = sorted(total, key=lambda product: total[product], reverse=True)
    first: Mapping[Any, OpShape] = {
        (product.kind, product.dtype): product for product in reversed(ranked)
    }
    chosen = sorted(first.values(), key=ranked.index)
    return list(dict.fromkeys([*chosen, *ranked]))[: max(most, len(chosen))]


def largest_scores(runs: Sequence[DryRun]) -> int:
    """Bytes of the scores of the largest attention, if computed plainly.

    Two copies in float32, before and after the softmax, which notes which scores are -inf.
    """
    return max(
        (
            prod(product.shapes[0][:-1]) * product.shapes[1][-2] * (2 * 4 + 1)
            for run in runs
            for product, _ in run.found.work.products
            if product.kind == "attention"
        ),
        default=0,
    )


def clashes_of(runs: Sequence[DryRun]) -> tuple[str, ...]:
    """Every clash of every stage, each place once."""
    return tuple(dict.fromkeys(line for run in runs for line in run.clashes()))


def describe_findings(plan: Plan) -> str:
    """The verdict of the dry runs in a sentence; empty if there are none."""
    if plan.dtype_errors:
        number = len(plan.dtype_errors)
        clashes = "1 clash" if number == 1 else f"{number} clashes"
        return f"{clashes} of precision in {plan.num_operations} operations"
    if not plan.stages:
        return ""
    return f"no clash of precision in {plan.num_operations} operations"
