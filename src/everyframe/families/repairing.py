"""Repairs: what is put on a module from outside so that its results are finite, and taken off.

A repair is a `Remedy`, which names a module and what it runs in from then on. Here is which remedy
a fault asks for, and how one is put on; when that is done is the guard's affair. Taking off gives
every bit back. Read next: `guarding.py`, which decides; `everyframe.precision.raising`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Remedy
from everyframe.numerics.locate import Fault
from everyframe.precision import edges
from everyframe.precision.dtypes import dtype_name, torch_dtype
from everyframe.precision.edges import Edges
from everyframe.precision.raising import Raised, is_below, narrowest, next_rung


class Repairs:
    """What is repaired in the components `parts`, by name, on that device."""

    def __init__(self, device: DeviceFacts, parts: Mapping[str, nn.Module]) -> None:
        self._device = device
        self._parts = dict(parts)
        self._rungs: dict[tuple[str, str], torch.dtype] = {}
        self._put_on: list[tuple[Remedy, Raised]] = []
        self._joined: list[Edges] = []
        self._dtypes = {
            name: dtype_name(narrowest(part) or torch.float32) for name, part in parts.items()
        }

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self._put_on)

    def all(self) -> tuple[Remedy, ...]:
        """What is put on, in that order."""
        return tuple(remedy for remedy, _ in self._put_on)

    def for_fault(self, fault: Fault, *, whole: bool = False) -> Remedy | None:
        """The least that may help: that module one rung up, or what is around it; None: nothing.

        With `whole`, the whole component.
        """
        to = next_rung(fault.dtype, self._device)
        if to is None or not fault.part:
            return None
        if fault.cause == "formula":
            to = torch.float32
        return self._raising(fault.part, "" if whole else fault.module, to)

    def around(self, remedy: Remedy) -> Remedy | None:
        """The same for what is around that module, as two dtypes met beside it; or None."""
        if not remedy.module:
            return None
        return self._raising(remedy.component, _around(remedy.module), torch_dtype(remedy.to))

    def _raising(self, component: str, module: str, to: torch.dtype) -> Remedy | None:
        while module and not self._is_below(component, module, to):
            module = _around(module)
        if not self._is_below(component, module, to):
            return None
        return Remedy(component, module, dtype_name(to), self._dtypes[component])

    def _is_below(self, component: str, module: str, to: torch.dtype) -> bool:
        """Whether that module was not put on that rung before."""
        before = self._rungs.get((component, module))
        return before is None or is_below(before, to)

    def put_on(self, remedy: Remedy) -> None:
        """Do it."""
        part, to = self._parts[remedy.component], torch_dtype(remedy.to)
        # Does nothing where the plan has put casts on already; somebody else's module has none.
        self._joined.append(edges.join(part))
        self._put_on.append((remedy, Raised(part.get_submodule(remedy.module), to)))
        self._rungs[remedy.component, remedy.module] = to

    def take_off(self, remedy: Remedy) -> None:
        """Undo that one, which was put on last."""
        self._put_on.pop()[1].undo()
        del self._rungs[remedy.component, remedy.module]

    def undo(self) -> None:
        """Everything as it was before the first repair, bit for bit."""
        while self._put_on:
            self.take_off(self._put_on[-1][0])
        for joined in self._joined:
            joined.remove()
        self._joined = []

    def widest(self) -> Sequence[Remedy]:
        """Each component that has parameters in half precision, wholly in float32."""
        return [
            Remedy(name, "", "float32", self._dtypes[name])
            for name, part in self._parts.items()
            if narrowest(part) not in (None, torch.float32)
        ]


def _around(name: str) -> str:
    return name.rpartition(".")[0]
