"""What a certificate is made of: one component with its calls, as plain values.

A subject is sent to the process that tries it, so it holds functions of modules and data only.
Read next: `trials`, `certify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everyframe.core.facts import DeviceFacts, Product
from everyframe.core.plan import Precision


@dataclass(frozen=True)
class Call:
    """One call of a component as its stage makes it; see `families.family.Rehearsal`.

    ``call(module, device)`` runs it; `module` gives the module on meta.
    """

    module: Callable[[], Any]
    call: Callable[[Any, str], object]
    outputs: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Subject:
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
    calls: tuple[Call, ...] = ()
    products: tuple[tuple[Product, float], ...] = ()
