"""What a certificate is made of: one component with its calls, as plain values.

A subject is sent to the process that tries it, so it holds functions of modules and data only.
Read next: `trials`, `certify`.
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
    """One call of a component as its stage makes it; see `families.family.Rehearsal`.

    ``call(module, device)`` runs it; `module` gives the module on meta.
    """

    module: Callable[[], Any]
    call: Callable[[Any, str], object]
    outputs: tuple[str, ...] = ("",)

    def part(self) -> nn.Module:
        """The component's own module, on meta."""
        found: nn.Module = self.module()
        return found

    def rehearse(self, precision: Precision, device: DeviceFacts) -> None:
        """Make the call dry, with the component in that precision."""
        from everyframe.dry_run.executor import dry_run_module

        dry_run_module(self.module(), precision, self.call, device, self.outputs)


@dataclass(frozen=True)
class JointTargetCall(TargetCall):
    """One in which several components work, of which `component` is meant.

    `module` gives all of them by name; `precisions` are those of the plan. `outputs_of` takes the
    place of `outputs`.
    """

    component: str = ""
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    outputs_of: Callable[[Any], tuple[str, ...]] = lambda module: ("",)

    def part(self) -> nn.Module:
        """The component's own module, on meta."""
        found: nn.Module = self.module()[self.component]
        return found

    def rehearse(self, precision: Precision, device: DeviceFacts) -> None:
        """Make the call dry, with the component in that precision and the others in theirs."""
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
    """A component on a device: `precision` is that of the plan, `plan_key` and `device_key` what
    its certificates are found by.

    `products` are those of its calls with all their operations in a run, heaviest first, as the dry
    run counted them.
    """

    component: str
    device: DeviceFacts
    num_threads: int
    precision: Precision
    plan_key: str
    device_key: str
    calls: tuple[TargetCall, ...] = ()
    products: tuple[tuple[OpShape, float], ...] = ()
