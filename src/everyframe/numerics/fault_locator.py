"""Locate the operation that made a non-finite value, and the module it belongs to.

The call is replayed under a `FaultRecorder` that sees every operation, while hooks track the
current module. So the faults behind the final result are known at the end, and an infinity that
vanished (a mask, ``1 / exp(x)``) is not blamed. Slow: it runs only after a non-finite result was
found. `everyframe.runtime.stages.guard` repairs the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.numerics.fault import Fault
from everyframe.numerics.fault_recorder import FaultRecorder, storage_of
from everyframe.numerics.tensor_stats import iter_tensors, value_range
from everyframe.ops.attention import restore_kernels

#: Argument names of tensors that may hold infinities on purpose.
_MASKS = ("mask", "bias")


@dataclass(frozen=True)
class Located:
    """Result of a replayed call.

    Attributes:
        faults: faults behind the result, the likeliest first.
        swallowed: faults, in order, whose infinities vanished before the result.
        error: what the call raised after a fault.
    """

    faults: tuple[Fault, ...]
    swallowed: tuple[Fault, ...] = ()
    error: Exception | None = None

    @property
    def fault(self) -> Fault | None:
        """The likeliest fault, or None if the result is finite."""
        return next(iter(self.faults), None)


def locate_fault(
    parts: Mapping[str, nn.Module],
    compute: Callable[[], object],
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Located:
    """Replay `compute`, which calls these components, and locate the faults behind its result.

    `given` are its inputs by name.
    """
    known = {**faults_of_inputs(parts, given), **_of_weights(parts)}
    run = FaultRecorder(known, partial(_find_weight, parts))
    error: Exception | None = None
    try:
        with restore_kernels(), _eager(), _follow(parts, run), run:
            result = compute()
        faults = run.faults_in(result)
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as raised:
        # Code may raise because of NaN alone.
        if not run.faults or is_out_of_memory(raised) or is_device_loss(raised):
            raise
        faults, error = run.in_order(range(len(run.faults))), raised
    blamed = {id(each) for each in faults}
    others = [each for each in run.faults if id(each) not in blamed and not each.is_planned]
    return Located(faults, tuple(others), error)


def _of_weights(parts: Mapping[str, nn.Module]) -> dict[int, Fault]:
    """Build a fault for each non-finite weight, by storage."""
    found: dict[int, Fault] = {}
    for part in parts:
        for name, tensor in bad_weights({part: parts[part]}):
            fault = _fault_of_weight(part, name.removeprefix(f"{part}."), tensor)
            found |= {storage_of(each): fault for each in iter_tensors(tensor)}
    return found


def _find_weight(parts: Mapping[str, nn.Module], tensor: Tensor) -> Fault | None:
    """The fault of a weight that is on the device for its call alone: another thread brought it."""
    memory = storage_of(tensor)
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            if any(storage_of(each) == memory for each in iter_tensors(parameter)):
                return _fault_of_weight(part, name, parameter)
    return None


def _fault_of_weight(part: str, name: str, tensor: Tensor) -> Fault:
    seen = value_range(tensor)
    return Fault(part, name, "", "weights", tensor.dtype, seen, seen, None)


def faults_of_inputs(parts: Mapping[str, nn.Module], given: Mapping[str, Any]) -> dict[int, Fault]:
    """Build a fault for each non-finite tensor in `given`, by storage; masks are planned ones."""
    found: dict[int, Fault] = {}
    part = next(iter(parts), "")
    for name, value in given.items():
        is_mask = any(word in name for word in _MASKS)
        for tensor in iter_tensors(value):
            seen = value_range(tensor)
            if not seen.is_finite:
                fault = Fault(part, "", name, "given", tensor.dtype, seen, seen, None, is_mask)
                found[storage_of(tensor)] = fault
    return found


def bad_weights(parts: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    """List parameters with NaN or infinity, and buffers with NaN, by name.

    Buffers may hold infinities on purpose, as masks do. Offloaded (meta) parameters are skipped;
    they are checked where they are used.
    """
    found = []
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:  # it waits in its file, and is looked at where it is used
                continue
            if not value_range(parameter.detach()).is_finite:
                found.append((f"{part}.{name}", parameter.detach()))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                found.append((f"{part}.{name}", buffer))
    return found


def _eager() -> AbstractContextManager[Any]:
    """Context: run compiled modules eagerly, as the mode would see a graph as one operation."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and it takes seconds to import
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _follow(parts: Mapping[str, nn.Module], run: FaultRecorder) -> Iterator[None]:
    """Context: track the component and dotted name of the current module on the run's stack."""
    stack = run.stack

    def entering(part: str, name: str) -> Callable[..., None]:
        return lambda *_: stack.append((part, name))

    def leaving(part: str, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            # A foreign hook may have raised before ours ran.
            if stack and stack[-1] == (part, name):
                run.handed_on((args, kwargs), result)
                stack.pop()

        return leave

    handles = []
    for part, whole in parts.items():
        for name, module in whole.named_modules():
            # Before our input casts, so that these count as the module's own.
            handles.append(module.register_forward_pre_hook(entering(part, name), prepend=True))
            after = module.register_forward_hook(
                leaving(part, name), with_kwargs=True, always_call=True
            )
            handles.append(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
