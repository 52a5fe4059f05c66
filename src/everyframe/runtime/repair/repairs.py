"""Repairs: run a module in a wider dtype or with plain kernels, applied from outside.

A `Repair` names a module and what it runs in from then on. This module chooses the repair for a
fault, applies it and undoes it bit for bit; the guard decides when (`guard.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.core.events import Event, Note
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import PLAIN, Repair
from everyframe.fast_paths.compilation.module_compilation import disable_compiled
from everyframe.hardware.memory import describe_memory_pressure
from everyframe.numerics.fault import Fault
from everyframe.numerics.fault_locator import bad_weights
from everyframe.ops import attention
from everyframe.precision import cast_hooks
from everyframe.precision.cast_hooks import CastHooks
from everyframe.precision.dtypes import dtype_name, torch_dtype
from everyframe.precision.upcast import Upcast, is_below, narrowest, next_rung
from everyframe.runtime.batch_member import change_modules

#: Undoes a repair.
Undo = Callable[[], None]


def apply_repair(component: nn.Module, repair: Repair, *, keeps_storage: bool = False) -> Undo:
    """Apply a repair to its component and return its undo function; see `Upcast`.

    Raises:
        InputError: the component has no such module.
    """
    try:
        module = component.get_submodule(repair.module)
    except AttributeError:
        raise InputError(
            f"{repair.place} is to run in {repair.to}, and this model has no such part; it is from "
            "a record of another model, or of another version of it"
        ) from None
    if repair.to == PLAIN:
        return _plain(module)
    return Upcast(module, torch_dtype(repair.to), keeps_storage=keeps_storage).undo


def plain_parts(repairs: Iterable[Repair]) -> Sequence[str]:
    """Names of the modules that these repairs run uncompiled and with plain kernels."""
    return [repair.module for repair in repairs if repair.to == PLAIN]


def _plain(module: nn.Module) -> Undo:
    """Run everything in the module with plain kernels, and nothing compiled."""
    undo: list[Undo] = [
        disable_compiled(module),
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


class RepairSet:
    """Active repairs of the components `parts`, by name, on that device.

    With `keeps_storage`, `undo` restores the storage of the weights too.
    """

    def __init__(
        self,
        device: DeviceFacts,
        parts: Mapping[str, nn.Module],
        *,
        keeps_storage: bool = False,
    ) -> None:
        self._device = device
        self._keeps_storage = keeps_storage
        self._parts = dict(parts)
        self._applied: list[tuple[Repair, Undo]] = []
        self._tried: set[Repair] = set()
        self._joined: list[CastHooks] = []
        self._dtypes = {
            name: dtype_name(narrowest(part) or torch.float32) for name, part in parts.items()
        }

    def __bool__(self) -> bool:
        """Whether any repair is active."""
        return bool(self._applied)

    def all(self) -> tuple[Repair, ...]:
        """Active repairs, in the order in which they were applied."""
        return tuple(repair for repair, _ in self._applied)

    def for_fault(self, fault: Fault, *, whole: bool = False) -> Repair | None:
        """Smallest repair to try: the module, or its parent, one dtype wider. None if exhausted.

        `whole` raises the whole component. A faulty kernel is replaced by a plain one, if any.
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
        return self._wider_repair(fault.part, "" if whole else fault.module, to)

    def plainly(self, component: str, module: str) -> Repair:
        """Repair that runs that module uncompiled and with plain kernels."""
        return Repair(component, module, PLAIN, self._dtypes[component])

    def around(self, repair: Repair) -> Repair | None:
        """The same repair for the parent module, after a dtype mismatch beside it; or None."""
        if not repair.module or repair.to == PLAIN:
            return None
        return self._wider_repair(repair.component, _parent(repair.module), torch_dtype(repair.to))

    def _wider_repair(self, component: str, module: str, to: torch.dtype) -> Repair | None:
        while module and not self._is_below(component, module, to):
            module = _parent(module)
        if not self._is_below(component, module, to):
            return None
        return Repair(component, module, dtype_name(to), self._dtypes[component])

    def _is_below(self, component: str, module: str, to: torch.dtype) -> bool:
        """Whether that module has not been raised to that dtype yet."""
        before = [
            torch_dtype(each.to)
            for each in self.all()
            if (each.component, each.module) == (component, module) and each.to != PLAIN
        ]
        return not before or is_below(before[-1], to)

    def apply(self, repair: Repair) -> None:
        """Apply a repair. Raises `LeftBatchError` in a batch, whose runs share the component."""
        change_modules(f"{repair.place} needs {repair.to}")
        part = self._parts[repair.component]
        # For foreign modules, which lack the plan's casts.
        self._joined.append(cast_hooks.add_input_casts(part))
        undo = apply_repair(part, repair, keeps_storage=self._keeps_storage)
        self._applied.append((repair, undo))
        self._tried.add(repair)

    def join(self) -> None:
        """Let each component accept inputs wider than its parameters."""
        # As in `apply`.
        self._joined += [cast_hooks.add_input_casts(part) for part in self._parts.values()]

    def remove(self, repair: Repair) -> None:
        """Undo that repair, which must be the last one applied."""
        last, undo = self._applied.pop()
        assert last == repair, "repairs are removed in the opposite order"
        undo()

    def take_back(self, number: int) -> None:
        """Undo all but the first `number` repairs."""
        while len(self._applied) > number:
            self.remove(self._applied[-1][0])

    def undo(self) -> None:
        """Undo everything; the components are as before the first repair, bit for bit."""
        self.take_back(0)
        for joined in self._joined:
            joined.remove()
        self._joined = []
        self._tried = set()

    def widest(self) -> Sequence[Repair]:
        """Repairs that run each half-precision component wholly in float32."""
        return [
            Repair(name, "", "float32", self._dtypes[name])
            for name, part in self._parts.items()
            if narrowest(part) not in (None, torch.float32)
        ]


def _has_two_ways(part: nn.Module, fault: Fault) -> bool:
    """Whether `_plain` has other kernels for the faulty operation."""
    module = part.get_submodule(fault.module)
    if "attention" in fault.operation:
        return True
    return any(getattr(each, "is_plain", None) is False for each in module.modules())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


#: Prompt words that ask for frames of one colour, and the range of that colour in 0..1.
_ASKS_FOR = {
    r"black|dark|darkness|night|fades?|fading": (0.0, 0.1),
    r"white|fades?|fading": (0.9, 1.0),
}

_CAUSES: dict[str, str] = {
    "range": "in float32 it is {wide}, and {dtype} ends at {limit:.0f}",
    "kernel": "in float32 it is {wide}, which fits into {dtype}: the kernel is wrong, or "
    "accumulates in too narrow a dtype",
    "formula": "the same operation is not finite in float32 either",
    "lost": "the operation alone is not finite in float32 either, the module is: {dtype} lost "
    "something before it",
    "compiled": "uncompiled it is {wide}: the compiled code is wrong",
    "unclear": "this kernel has no float32 form to compare with",
}


class GuardLog:
    """Events of a stage's calls, and how messages name a call: "step 3 of denoise".

    `counts` is what is counted ("step"), `of` what it belongs to ("denoise").
    """

    def __init__(self, device: DeviceFacts, stage: str, counts: str, of: str) -> None:
        self.stage = stage
        self._device = device
        self._counts, self._of = counts, of
        self._pending_events: list[Event] = []

    def place(self, number: int) -> str:
        """Name of a call, such as "step 3 of denoise"."""
        return f"{self._counts} {number} of {self._of}"

    def where(self, number: int) -> str:
        """Name of a call, with a remark if memory is near its limit and the system reports it."""
        memory = describe_memory_pressure(self._device)
        return self.place(number) + (f" ({memory})" if memory else "")

    def add_events(self, *events: Event) -> None:
        """Add events."""
        self._pending_events += events

    def events(self) -> Iterator[Event]:
        """Events added since the last call."""
        events, self._pending_events = self._pending_events, []
        yield from events


def describe_fault(fault: Fault, why: str) -> str:
    """Describe a fault in one clause; `why` is a key of `_CAUSES`."""
    if fault.wide is None and why != "unclear":
        return f"{fault.operation} in {fault.place} passed on values that are not finite"
    dtype = dtype_name(fault.dtype)
    cause = _CAUSES[why].format(wide=fault.wide, dtype=dtype, limit=torch.finfo(fault.dtype).max)
    return (
        f"{fault.operation} in {fault.place} made values that are not finite in {dtype} "
        f"(operands {fault.given}, result {fault.made}; {cause})"
    )


def prompt_truncated_note(cut: str) -> Note:
    """Note that a text encoder truncated the prompt; quotes the lost words."""
    message = f"the prompt is too long for the model; its end is cut: {cut!r}"
    return Note(message, in_record=True)


def bad_weights_message(
    parts: Mapping[str, nn.Module], place: str, *, is_shared: bool = False
) -> str:
    """Message for non-finite weights in these components, beginning with the one at `place`.

    If none is in memory, they are in their file, or on another rank if ranks share the component.
    """
    bad = bad_weights(parts)
    if not bad:
        where = " on another rank" if is_shared else ""
        return (
            f"the weights themselves are not finite{where}: {place}. Its file is broken, "
            "or they do not fit into the dtype; try --dtype fp32. Nothing was written"
        )
    name, tensor = next((each for each in bad if each[0] == place), bad[0])
    count = int((~tensor.isfinite()).sum())
    more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
    dtype = dtype_name(tensor.dtype)
    why = "The file is broken"
    if dtype != "float32":
        why = f"Either the file is broken, or they do not fit into {dtype}; try --dtype fp32"
    return (
        f"the weights themselves are not finite: {name} in {count} of {tensor.numel()} values"
        f"{more}. {why}. Nothing was written"
    )


def asks_for(prompt: str, frames_TX: Tensor) -> bool:
    """Whether the prompt asks for frames (values 0..1) of the single colour that these have."""
    low, high = float(frames_TX.min()), float(frames_TX.max())
    return any(
        least <= low and high <= most and re.search(rf"\b({words})\b", prompt, re.IGNORECASE)
        for words, (least, most) in _ASKS_FOR.items()
    )
