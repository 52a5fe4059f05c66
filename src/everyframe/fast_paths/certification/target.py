"""Certification target: one component with its calls, as plain picklable values.

It is sent to the trial process, so it holds only functions that build modules, and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everyframe.core.facts import DeviceFacts, OpShape
from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TargetCall:
    """A call of the target; see `everyframe.dry_run.call.DryRunCall`.

    `precisions` are the plan's for all components of the call, by name.
    """

    call: DryRunCall
    precisions: Mapping[str, Precision]

    def module(self) -> nn.Module:
        """Build the target's module on meta."""
        found: nn.Module = self.call.module()
        return found

    def dry_run(self, precision: Precision, device: DeviceFacts) -> None:
        """Dry-run the call, with the target in that precision and the others in the plan's."""
        from everyframe.dry_run.executor import dry_run

        dry_run(self.call, {**self.precisions, self.call.component: precision}, device)


@dataclass(frozen=True)
class CertificationTarget:
    """A component on a device, for which fast paths are tried.

    Attributes:
        component: its name.
        device: facts of the device.
        num_threads: CPU threads.
        precision: the plan's precision.
        plan_key: key of its certificates, by plan.
        device_key: key of its certificates, by device.
        calls: its calls.
        products: products of its calls with their FLOPs per run, the most expensive first, as
            counted by the dry run.
        paths: fast paths that are used anyway, on both sides of a comparison.
    """

    component: str
    device: DeviceFacts
    num_threads: int
    precision: Precision
    plan_key: str
    device_key: str
    calls: tuple[TargetCall, ...] = ()
    products: tuple[tuple[OpShape, float], ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of its certificates."""
        return self.device_key, self.plan_key
