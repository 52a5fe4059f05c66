"""Benchmark this machine: peaks, fast paths, synthetic blocks, a video; each in its own process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

from everyframe._version import __version__
from everyframe.core.bytes import fits
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.plan import Precision
from everyframe.doctor.benchmark import block, peaks, video
from everyframe.doctor.benchmark.result import (
    BenchedMachine,
    BenchResult,
    BlockResult,
    FastPathResult,
    PeakResult,
    VideoResult,
)
from everyframe.doctor.report import shareable
from everyframe.hardware.isolation import run_isolated

if TYPE_CHECKING:
    from everyframe.dry_run.call import DryRunCall
    from everyframe.planning.dry_runs import DryRun

OnProgress = Callable[[str], None]

#: Seconds that a part may take, and those of each fast path.
_PART_SECONDS, _PATH_SECONDS = 180.0, 30.0
#: A larger size is left out if a step of it would take longer, in seconds.
_LONGEST_STEP = 6.0
_PRODUCTS = ("float32", "bfloat16", "float16")


def benchmark(
    device: str = "auto", *, is_quick: bool = False, on_progress: OnProgress
) -> BenchResult:
    """Measure a device of this machine, for two to five minutes.

    Args:
        device: a device, or ``auto``.
        is_quick: the smallest blocks alone, and no fast paths.
        on_progress: called with a line before each part.

    Raises:
        InputError: there is no such device.
    """
    # Late import: brings torch.
    from everyframe.hardware.facts import machine_facts, pick_device
    from everyframe.planning.resolve import default_threads

    began, load = time.monotonic(), _load()
    facts = machine_facts(device)
    chosen = pick_device(facts, device)
    measuring = _Measuring(chosen, default_threads(facts, 1), on_progress)
    machine = _machine(facts, chosen, measuring.num_threads)
    found_peaks = measuring.peaks()
    found_video = measuring.video()
    fast_paths, blocks = measuring.blocks(is_quick=is_quick)
    return BenchResult(
        everyframe=__version__,
        date=date.today().isoformat(),
        load=load,
        machine=machine,
        peaks=found_peaks,
        fast_paths=fast_paths,
        blocks=blocks,
        video=found_video,
        failed=measuring.failed,
        seconds=round(time.monotonic() - began, 1),
    )


class _Measuring:
    """Runs the parts on one device; `failed` holds how failed parts ended."""

    def __init__(self, device: DeviceFacts, num_threads: int, on_progress: OnProgress) -> None:
        self.device = device
        self.num_threads = num_threads
        self.on_progress = on_progress
        self.failed: dict[str, str] = {}

    def peaks(self) -> tuple[PeakResult, ...]:
        self.on_progress("peaks: matrix products and copies")
        dtypes = tuple(name for name in _PRODUCTS if name in self.device.dtypes)
        found = self._measure("peaks", peaks.measure_peaks, dtypes)
        return tuple(PeakResult(**each) for each in found or ())

    def video(self) -> VideoResult | None:
        self.on_progress("a video of the embedded model, twice")
        found = self._measure("video", video.measure_video)
        return None if found is None else VideoResult(**found)

    def blocks(
        self, *, is_quick: bool
    ) -> tuple[tuple[FastPathResult, ...], tuple[BlockResult, ...]]:
        """Fast paths on the smallest blocks, then the blocks at each size that fits."""
        from everyframe.planning.dry_runs import DryRun, dry_run

        precision = _precision(self.device)
        fast_paths: tuple[FastPathResult, ...] = ()
        results: list[BlockResult] = []
        for number, size in enumerate(block.SIZES[: 1 if is_quick else None]):
            call = block.step_call(size)
            run = dry_run(call, {block.COMPONENT: precision}, self.device)
            assert isinstance(run, DryRun), "it is a call of our own"
            if number == 0 and not is_quick:
                fast_paths = self._fast_paths(run, precision)
            forecast = _weight_bytes(call, precision) + run.found.working_bytes
            if not fits(2 * forecast, self.device):
                break
            seconds = self._forecast_seconds(run)
            if number and seconds is not None and seconds > _LONGEST_STEP:
                break
            used = tuple(each.name for each in fast_paths if each.verdict == "certified")
            result = self._block(size, run, used, forecast, seconds)
            if result is None:
                break
            results.append(result)
        return fast_paths, tuple(results)

    def _forecast_seconds(self, run: DryRun) -> float | None:
        """Seconds of a step by plain torch, as a plan forecasts them; None if it can't."""
        from everyframe.planning.dry_runs import call_seconds, heaviest
        from everyframe.planning.throughput_cache import rates_here

        if "peaks" in self.failed:
            return None  # a product crashed; it is not to crash this process too
        rates = rates_here(heaviest([run], 6, {block.COMPONENT: ()}), self.device, self.num_threads)
        return None if rates is None else call_seconds(run.found.work, rates, ())

    def _block(
        self, size: tuple[int, int, int], run: DryRun, paths: tuple[str, ...],
        forecast: int, seconds: float | None,
    ) -> BlockResult | None:  # fmt: skip
        work, precision = block.describe_work(size), run.precisions[block.COMPONENT]
        self.on_progress(work)
        peak = run_isolated(
            block.measure_memory, size, precision, self.device, self.num_threads,
            seconds=_PART_SECONDS,
        )  # fmt: skip
        took = run_isolated(
            block.measure_seconds, size, precision, paths, self.device.torch_name,
            self.num_threads, seconds=_PART_SECONDS,
        )  # fmt: skip
        if not took.is_well:
            self.failed[work] = shareable(str(took))
            return None
        return BlockResult(
            work=work,
            precision=precision.compute,
            paths=paths,
            seconds=took.value[1],
            plain_seconds=took.value[0],
            operations=run.found.work.operations,
            peak_bytes=peak.value if peak.is_well else None,
            forecast_bytes=forecast,
            forecast_seconds=seconds,
        )

    def _fast_paths(self, run: DryRun, precision: Precision) -> tuple[FastPathResult, ...]:
        """Trials of each fast path of this device that applies, as `fast-paths --certify` runs."""
        from everyframe.fast_paths.certification.certify import certify
        from everyframe.fast_paths.registry import for_device
        from everyframe.planning.fast_paths.component_certificates import Certificates

        self.on_progress("fast paths on the smallest blocks")
        target = Certificates(self.device, self.num_threads).subject(
            block.COMPONENT, precision, [run]
        )
        paths = [path for path in for_device(self.device) if not path.on_demand
                 and run.has_place(path.name, is_quantized=False)]  # fmt: skip
        found = []
        for path in paths:  # one by one, so that a slow one leaves the others their time
            done = certify(target, [path], _PATH_SECONDS)
            found += [
                FastPathResult(name=path.name, verdict=each.verdict, gain=each.gain,
                               error=each.error, limit=each.limit, reason=shareable(each.reason))
                for each in done.certificates
            ]  # fmt: skip
            found += [
                FastPathResult(name=path.name, verdict="untried", reason=shareable(why))
                for why in done.untried.values()
            ]
        return tuple(found)

    def _measure(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        ended = run_isolated(
            function, self.device.torch_name, *arguments, self.num_threads, seconds=_PART_SECONDS
        )
        if ended.is_well:
            return ended.value
        self.failed[part] = shareable(str(ended))
        return None


def _precision(device: DeviceFacts) -> Precision:
    """The precision that a plan takes for a model of billions of parameters on that device."""
    from everyframe.families.opensora.components import DENOISER_ISLANDS
    from everyframe.precision.policy import ComponentNeeds, choose

    return choose(device, "auto", ComponentNeeds(block.COMPONENT, 10**10, DENOISER_ISLANDS))[0]


def _weight_bytes(call: DryRunCall, precision: Precision) -> int:
    """Bytes of the parameters; islands are as wide as everything else in this estimate."""
    from everyframe.precision.dtypes import num_bytes

    size = num_bytes(precision.parameters)
    return size * sum(int(each.numel()) for each in call.module().parameters())


def _machine(facts: MachineFacts, device: DeviceFacts, num_threads: int) -> BenchedMachine:
    import torch

    from everyframe.hardware.cpu import processor_name
    from everyframe.hardware.software import software_facts

    software = software_facts()
    packages = ("torch", "triton", "diffusers", "transformers", "numpy")
    versions = {name: software.packages[name] for name in packages if name in software.packages}
    versions["python"] = software.python
    if software.driver:
        versions["driver"] = software.driver
    capability = device.capability
    return BenchedMachine(
        device=device.name,
        kind=device.kind,
        memory=device.memory,
        capability=None if capability is None else ".".join(map(str, capability)),
        processor=processor_name(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        num_cores=facts.num_cores,
        num_threads=num_threads,
        host_memory=facts.cpu.memory,
        system=software.system,
        versions=versions,
    )


def _load() -> float:
    """Load: runnable processes per core; 0 if the system does not report it."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
