"""Fit a request on its devices: how they divide the work, and how each holds its part.

Read next: `parallelism.py` (the division), `memory/memory_fit.py` (one device's memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everyframe.core.bytes import parse_bytes, without_processes
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.plan import Repair, Settings
from everyframe.core.request import DTYPES, Request
from everyframe.planning.component_precision import (
    QuantizationChoice,
    check_effect,
    quantization_choice,
)
from everyframe.planning.division_checks import shares_asked
from everyframe.planning.fast_paths import component_certificates
from everyframe.planning.fast_paths.blocked_paths import find_blocked
from everyframe.planning.fast_paths.choose_fast_paths import FastPathChooser, pins_of
from everyframe.planning.load_balancing import (
    BalancedPlan,
    are_alike,
    balance,
    common_facts,
    speed_dtype,
    weights_by_speed,
    with_weights,
)
from everyframe.planning.memory.component_memory import ComponentPlanner
from everyframe.planning.memory.memory_fit import MemoryFit, with_memory_limit
from everyframe.planning.output_size import with_output_size
from everyframe.planning.parallelism import (
    AVOIDED,
    asked_devices,
    can_share,
    make_parallel_plan,
)
from everyframe.planning.quality import Fit
from everyframe.precision.policy import check_asked
from everyframe.runtime.interface import ModelSpec
from everyframe.runtime.repair.repair_cache import cached_key, load_repairs


@dataclass(frozen=True)
class Target:
    """What a request is planned for.

    Attributes:
        devices: of its ranks, with the memory that may be used.
        num_threads: of the CPU, for each rank.
        is_here: this machine, not a profile of one.
    """

    facts: MachineFacts
    devices: tuple[DeviceFacts, ...]
    num_threads: int
    is_here: bool = True

    @property
    def device(self) -> DeviceFacts:
        """The facts that hold for all devices."""
        return common_facts(self.devices)


def usable_devices(
    request: Request, facts: MachineFacts, joined: Sequence[DeviceFacts] | None
) -> tuple[DeviceFacts, ...]:
    """The devices of a request with the memory that may be used.

    `joined` are those of ranks that have met: these have begun, and what they take is no longer
    free. Of others, what their processes will take is left out.

    Raises:
        InputError: the machine has no such devices, or one lacks the requested dtype.
    """
    devices = joined
    if not devices:
        asked = asked_devices(request, facts)
        devices = [without_processes(device, len(asked)) for device in asked]
    for device in devices:
        check_asked(device, DTYPES[request.dtype], force=request.force)
    most = _asked_bytes(request, "max_memory")
    return tuple(with_memory_limit(device, most) for device in devices)


def within_limits(request: Request, facts: MachineFacts) -> tuple[DeviceFacts, ...]:
    """All devices of a machine, with the memory that the request may use."""
    most, host = _asked_bytes(request, "max_memory"), _asked_bytes(request, "max_host_memory")
    limited = (with_memory_limit(device, most) for device in facts.devices)
    return tuple(
        with_memory_limit(device, host if device.kind == "cpu" else None) for device in limited
    )


def make_chooser(request: Request, target: Target) -> FastPathChooser:
    """What chooses fast paths for these devices."""
    device, alike = target.device, are_alike(target.devices)
    certificates = component_certificates.Certificates(device, target.num_threads)
    avoided = AVOIDED if len(target.devices) > 1 else {}
    return FastPathChooser(
        device,
        pins_of(request, device, is_here=target.is_here),
        # Certificates of one device say nothing about others.
        certificates if target.is_here and alike else None,
        find_blocked(target.facts, device, is_here=target.is_here).and_these(avoided),
        expects=alike,
        num_threads=target.num_threads,
    )


def first_repairs(request: Request, model: ModelSpec, target: Target) -> tuple[Repair, ...]:
    """Repairs to begin with: those of a record, else those cached from earlier runs here."""
    if request.repairs is not None:
        return tuple(request.repairs)
    if request.forget_repairs:
        return ()
    key = cached_key(model, target.device, target.facts.versions)
    return () if key is None else load_repairs(key)


def _asked_bytes(request: Request, name: str) -> int | None:
    written = getattr(request, name)
    return None if written is None else parse_bytes(written, name)


@dataclass(frozen=True)
class RequestFit:
    """Fits a request of a model on its target.

    Attributes:
        repairs: those to begin with.
        will_run: certificates that are missing are created, and only certified paths kept.
    """

    request: Request
    model: ModelSpec
    target: Target
    chooser: FastPathChooser
    repairs: tuple[Repair, ...]
    will_run: bool

    def fit(self, settings: Settings, products: str) -> Fit:
        """The memory fit, with the denoiser's `products` if a budget chose them.

        If a video doesn't fit on one device, several share it.
        """
        request, sharded = self.request, self.request.shard_weights
        shares = self._shares(settings, products, shards=sharded)
        fitting, fitted = shares.fitting, shares.fitting.fit(settings)
        others: list[dict[str, bool]] = []
        if can_share(request, self.model, shares.division):
            others.append({"shards": True})
        if shares.division is not None and shares.division.cfg_degree > 1:
            # With separate branches, all tokens of a branch are on fewer devices.
            others.append({"shards": sharded, "together": True})
        for how in others if not fitted.fits else ():
            other = self._shares(settings, products, **how)
            again = other.fitting.fit(settings)
            if again.fits:
                shares, fitting, fitted = other, other.fitting, again
                break
        check_effect(fitting.planner.quantization, self.model.title, fitted.components)
        # Skip what doesn't fit this device in any case.
        if self.will_run and fitted.fits:
            tried = component_certificates.make_at_once(
                self.chooser.certificates, fitted.components, fitted.runs
            )
            if tried is not None:
                fitting = fitting.certified_alone()
                fitted = fitting.fit(settings)
                fitted = replace(fitted, notes=(*fitted.notes, *tried))
        division = with_weights(shares.division, self.model, fitted)
        return replace(shares, division=division), fitting, with_output_size(fitted)

    def _shares(
        self, settings: Settings, products: str, *, shards: bool, together: bool = False
    ) -> BalancedPlan:
        """Divide the work among devices, which may be unequal.

        `shards`: several devices per video, to shard its weights; `together`: split CFG on request
        only.
        """
        request, devices, num_threads = self.request, self.target.devices, self.target.num_threads
        fitting = self._memory_fit(products)
        asked = shares_asked(request, len(devices))
        weights = asked or weights_by_speed(
            devices, speed_dtype(DTYPES[request.dtype]), num_threads
        )

        def divided(weights: Sequence[float]) -> ParallelPlan | None:
            return make_parallel_plan(
                request,
                self.model,
                settings,
                devices,
                fitting.effort,
                num_threads,
                weights,
                shards=shards,
                together=together,
            )

        return balance(fitting, devices, settings, weights, divided, is_asked=asked is not None)

    def _memory_fit(self, products: str) -> MemoryFit:
        request, device, facts = self.request, self.target.device, self.target.facts
        host = with_memory_limit(facts.cpu, _asked_bytes(request, "max_host_memory"))
        if device.kind == "cpu":  # both limits are of the same memory
            device = with_memory_limit(device, host.free_memory)
        chosen = QuantizationChoice(products) if products else quantization_choice(request, device)
        return MemoryFit(
            ComponentPlanner(
                model=self.model,
                device=device,
                asked=DTYPES[request.dtype],
                force=request.force,
                host_memory=host.free_memory,
                chooser=self.chooser,
                repairs=self.repairs,
                quantization=chosen,
                shards=request.shard_weights,
            )
        )
