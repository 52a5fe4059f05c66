"""Repairs: what is put on a module from outside so that its results are finite, and taken off.

A repair is a `Remedy`, which names a module and what it runs in from then on. Here is which remedy
a fault asks for, and how one is put on; when that is done is the guard's affair. Taking off gives
every bit back. Read next: `guarding.py`, which decides; `everyframe.precision.raising`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import PLAIN, Remedy
from everyframe.numerics.locate import Fault
from everyframe.ops import attention
from everyframe.optimize.compiling import run_as_written
from everyframe.precision import edges
from everyframe.precision.dtypes import dtype_name, torch_dtype
from everyframe.precision.edges import Edges
from everyframe.precision.raising import Raised, is_below, narrowest, next_rung

#: What undoes a repair.
Undo = Callable[[], None]


def put_on(component: nn.Module, remedy: Remedy) -> Undo:
    """Put a remedy on its component; what takes it off again.

    Raises:
        InputError: the component has no such module.
    """
    try:
        module = component.get_submodule(remedy.module)
    except AttributeError:
        raise InputError(
            f"{remedy.place} is to run in {remedy.to}, and this model has no such part; it is from "
            "a record of another model, or of another version of it"
        ) from None
    if remedy.to == PLAIN:
        return _plain(module)
    return Raised(module, torch_dtype(remedy.to)).undo


def plain_parts(remedies: Iterable[Remedy]) -> Sequence[str]:
    """The modules that these have run by plain kernels, and as they are written."""
    return [remedy.module for remedy in remedies if remedy.to == PLAIN]


def _plain(module: nn.Module) -> Undo:
    """Have everything in the module computed by plain kernels, and nothing by what was compiled."""
    undo: list[Undo] = [
        run_as_written(module),
        attention.attend_by(module, attention.PLAIN, inside=True).remove,
    ]
    for part in module.modules():
        if getattr(part, "is_plain", None) is False:
            undo.append(_set(part, "is_plain", True))
        # diffusers' attention processors, of which each module has one.
        processor = getattr(part, "processor", None)
        if getattr(processor, "_attention_backend", None) is not None:
            undo.append(_set(processor, "_attention_backend", None))

    def undo_all() -> None:
        for each in reversed(undo):
            each()

    return undo_all


def _set(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


class Repairs:
    """What is repaired in the components `parts`, by name, on that device."""

    def __init__(self, device: DeviceFacts, parts: Mapping[str, nn.Module]) -> None:
        self._device = device
        self._parts = dict(parts)
        self._put_on: list[tuple[Remedy, Undo]] = []
        self._tried: set[Remedy] = set()
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

        With `whole`, the whole component. A kernel that is wrong is not used, if there is another.
        """
        if not fault.part or fault.cause in ("weights", "given"):
            return None
        if fault.cause in ("kernel", "unclear"):
            plain = self.plainly(fault.part, fault.module)
            if _has_two_ways(self._parts[fault.part], fault) and plain not in self._tried:
                return plain
        to = next_rung(fault.dtype, self._device)
        if to is None:
            return None
        if fault.cause == "formula":
            to = torch.float32
        return self._raising(fault.part, "" if whole else fault.module, to)

    def plainly(self, component: str, module: str) -> Remedy:
        """That module by plain kernels, and as it is written."""
        return Remedy(component, module, PLAIN, self._dtypes[component])

    def around(self, remedy: Remedy) -> Remedy | None:
        """The same for what is around that module, as two dtypes met beside it; or None."""
        if not remedy.module or remedy.to == PLAIN:
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
        before = [
            torch_dtype(each.to)
            for each in self.all()
            if (each.component, each.module) == (component, module) and each.to != PLAIN
        ]
        return not before or is_below(before[-1], to)

    def put_on(self, remedy: Remedy) -> None:
        """Do it."""
        part = self._parts[remedy.component]
        # Does nothing where the plan has put casts on already; somebody else's module has none.
        self._joined.append(edges.join(part))
        self._put_on.append((remedy, put_on(part, remedy)))
        self._tried.add(remedy)

    def join(self) -> None:
        """Have each of the components take inputs that are wider than its parameters."""
        # Does nothing where the plan has put casts already; somebody else's module has none.
        self._joined += [edges.join(part) for part in self._parts.values()]

    def take_off(self, remedy: Remedy) -> None:
        """Undo that one, which was put on last."""
        last, undo = self._put_on.pop()
        assert last == remedy, "repairs come off in the opposite order"
        undo()

    def take_back(self, number: int) -> None:
        """Undo all but the first so many."""
        while len(self._put_on) > number:
            self.take_off(self._put_on[-1][0])

    def undo(self) -> None:
        """Everything as it was before the first repair, bit for bit."""
        self.take_back(0)
        for joined in self._joined:
            joined.remove()
        self._joined = []
        self._tried = set()

    def widest(self) -> Sequence[Remedy]:
        """Each component that has parameters in half precision, wholly in float32."""
        return [
            Remedy(name, "", "float32", self._dtypes[name])
            for name, part in self._parts.items()
            if narrowest(part) not in (None, torch.float32)
        ]


def _has_two_ways(part: nn.Module, fault: Fault) -> bool:
    """Whether there are other kernels for what went wrong, which are put on by `_plain`."""
    module = part.get_submodule(fault.module)
    if "attention" in fault.operation:
        return True
    return any(getattr(each, "is_plain", None) is False for each in module.modules())


def _around(name: str) -> str:
    return name.rpartition(".")[0]
