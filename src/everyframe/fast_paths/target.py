"""Certification target: one component with its calls, as plain picklable values.

It is sent to the trial process, so it holds only functions that build modules, and data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from everyframe.core.facts import DeviceFacts, OpShape
from everyframe.core.plan import Precision

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TargetCall:
    """One call of a component as its stage makes it; see `everyframe.runtime.interface.DryRunCall`.

    ``call(module, device)`` runs it; `module` builds the module on meta.
    """

    module: Callable[[], Any]
    call: Callable[[Any, str], object]
    outputs: tuple[str, ...] = ("",)

    def part(self) -> nn.Module:
        """Build the component's module on meta."""
        found: nn.Module = self.module()
        return found

    def rehearse(self, precision: Precision, device: DeviceFacts) -> None:
        """Dry-run the call, with the component in that precision."""
        from everyframe.dry_run.executor import dry_run_module

        dry_run_module(self.module(), precision, self.call, device, self.outputs)


@dataclass(frozen=True)
class JointTargetCall(TargetCall):
    """A call that uses several components, one of which is the target.

    Attributes:
        component: the target.
        precisions: the plan's precisions by component.
        outputs_of: replaces `outputs`; `module` returns all components by name.
    """

    component: str = ""
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    outputs_of: Callable[[Any], tuple[str, ...]] = lambda module: ("",)

    def part(self) -> nn.Module:
        """Build the target's module on meta."""
        found: nn.Module = self.module()[self.component]
        return found

    def rehearse(self, precision: Precision, device: DeviceFacts) -> None:
        """Dry-run the call, with the target in that precision and the others in the plan's."""
        from everyframe.dry_run.executor import DryRunModule, dry_run_modules

        modules = self.module()
        precisions = {**self.precisions, self.component: precision}
        parts = {
            name: DryRunModule(module, precisions[name], self.outputs_of(module))
            for name, module in modules.items()
        }
        dry_run_modules(parts, partial(self.call, modules), device)


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
    """

    component: str
    device: DeviceFacts
    num_threads: int
    precision: Precision
    plan_key: str
    device_key: str
    calls: tuple[TargetCall, ...] = ()
    products: tuple[tuple[OpShape, float], ...] = ()
