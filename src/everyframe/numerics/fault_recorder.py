"""Dispatch mode that follows non-finite values from the operations that make them.

An operation that turns finite operands into NaN or infinity is a fault; it is repeated in float32
on the same operands, which tells the cause. Results computed from a non-finite value inherit its
faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from everyframe.hardware.device_loss import is_device_loss
from everyframe.numerics.fault import Cause, Fault
from everyframe.numerics.tensor_stats import Range, iter_tensors, value_range
from everyframe.ops.native.kernels import KernelMode
from everyframe.precision.plain_tensors import is_plain

#: Operations that allocate uninitialised memory.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
             "new_empty_strided", "resize")  # fmt: skip

#: Names of operations for messages, where torch's name is not the usual one.
_SPOKEN = {"to": "cast", "to_copy": "cast", "addmm": "linear"}

#: Most faults that one value inherits; the likeliest are kept.
_MOST = 8


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def has_own_memory(operands: Any, answer: Any) -> bool:
    """Whether an operation's result has memory of its own; that of a view is its operand's.

    An operation such as ``to`` gives a view or makes values, and torch calls it a view.
    """
    given = {storage_of(each) for each in iter_tensors(operands)}
    return any(storage_of(each) not in given for each in iter_tensors(answer))


class FaultRecorder(KernelMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees every operation and tracks which faults each result comes from.

    `known` are faults of memory that was non-finite before the call. ``find_weight(tensor)`` gives
    the fault of a weight that no operation was seen to bring. Faults are tracked by storage; a
    storage that is reused for a new tensor drops its old faults.
    """

    #: Torch asks each mode this for operators without a schema, such as flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, because flex_attention compiles itself, which torch refuses in any other mode."""
        return True

    def __init__(
        self,
        known: Mapping[int, Fault],
        find_weight: Callable[[Tensor], Fault | None] = lambda tensor: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self._known, self._find_weight = known, find_weight
        self._origins: dict[int, tuple[int, ...]] = {}
        self._is_looking = False

    def in_order(self, numbers: Iterable[int]) -> tuple[Fault, ...]:
        """Faults with these numbers, the likeliest first."""
        return tuple(self.faults[number] for number in self._sort(numbers))

    def faults_in(self, result: Any) -> tuple[Fault, ...]:
        """Faults behind the non-finite tensors of a result."""
        return self.in_order(_Seen.of(result, self._origins_of).origins)

    def handed_on(self, given: Any, result: Any) -> None:
        """Record non-finite values of a module's result that no operation made, as from a hook."""
        self._is_looking = True
        inputs = {storage_of(each) for each in iter_tensors(given)}
        for tensor in iter_tensors(result):
            if storage_of(tensor) in inputs or value_range(tensor).is_finite:
                continue
            if not self._origins_of(tensor):
                seen = _Seen.of(given, self._origins_of)
                made = self._fault("hook", tensor.dtype, "formula", seen.range, value_range(tensor))
                self._origins[storage_of(tensor)] = (self._add(made),)
        self._is_looking = False

    def note_kernel(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Record the faults of a kernel in C, and forget those of what was in its memory before."""
        self._is_looking = True
        given, made = _Seen.of(inputs, self._origins_of), value_range(output)
        self._origins.pop(storage_of(output), None)
        if not made.is_finite:
            fault = self._fault("a kernel in C", output.dtype, "unclear", given.range, made)
            self._origins[storage_of(output)] = given.origins or (self._add(fault),)
        self._is_looking = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = (args, kwargs or {})
        if self._is_looking:
            return func(*args, **operands[1])
        schema = getattr(func, "_schema", None)
        mutates = schema is not None and schema.is_mutable
        # In-place operations overwrite operands, so these are read first.
        given = _Seen.of(operands, self._origins_of) if mutates else None
        wide = tree_map(_widen, operands) if mutates else None
        answer = func(*args, **operands[1])
        made = value_range(answer)
        if made.is_finite:
            self._forget(operands, answer)
            return answer
        given = given or _Seen.of(operands, self._origins_of)
        name = (schema or func).name
        name = (name if isinstance(name, str) else name()).split("::")[-1].strip("_")
        origins = given.origins
        if not (origins or mutates or has_own_memory(operands, answer)):
            return answer  # it makes no values, and what uses them may know where they are from
        is_nan_made = math.isnan(made.low) and not given.has_nan
        if not origins or (is_nan_made and all(self.faults[each].is_planned for each in origins)):
            # A mask has infinite inputs or an infinite number among its operands.
            is_put = not given.range.is_finite or _has_infinite_number(operands)
            is_planned = name in _UNFILLED or (is_put and math.isfinite(made.high))
            fault = self._judge(func, name, operands, wide, given, answer, is_planned)
            origins = self._sort((*origins, self._add(fault)))
        for tensor in iter_tensors(answer):
            if not value_range(tensor).is_finite:
                held = self._origins.get(storage_of(tensor), ()) if mutates else ()
                self._origins[storage_of(tensor)] = self._sort({*held, *origins})
        return answer

    def _forget(self, operands: Any, answer: Any) -> None:
        """Drop faults of memory that was reused for a new tensor."""
        if self._origins:
            held = {storage_of(each) for each in iter_tensors(operands)}
            for tensor in iter_tensors(answer):
                if storage_of(tensor) not in held:
                    self._origins.pop(storage_of(tensor), None)

    def _origins_of(self, tensor: Tensor) -> tuple[int, ...]:
        memory = storage_of(tensor)
        if memory not in self._origins:
            fault = self._known.get(memory) or self._find_weight(tensor)
            if fault is not None:
                self._origins[memory] = (self._add(fault),)
        return self._origins.get(memory, ())

    def _sort(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(numbers, key=lambda each: (self.faults[each].is_planned, each))[:_MOST])

    def _add(self, fault: Fault) -> int:
        self.faults.append(fault)
        return len(self.faults) - 1

    def _fault(
        self, operation: str, dtype: torch.dtype, cause: Cause, given: Range, made: Range,
        wide: Range | None = None, is_planned: bool = False,
    ) -> Fault:  # fmt: skip
        part, module = self.stack[-1] if self.stack else ("", "")
        return Fault(part, module, operation, cause, dtype, given, made, wide, is_planned)

    def _judge(
        self, func: Any, name: str, operands: Any, wide: Any, given: _Seen, answer: Any,
        is_planned: bool,
    ) -> Fault:  # fmt: skip
        floats = [*iter_tensors(answer), *iter_tensors(operands)]
        # A cast has the dtype that it casts to, everything else the narrowest that it works on.
        dtype = min((each.dtype for each in floats), key=lambda dtype: dtype.itemsize)
        args, kwargs = wide or tree_map(_widen, operands)
        try:
            in_float32: Range | None = value_range(func(*args, **kwargs))
        except (RuntimeError, TypeError) as error:
            if is_device_loss(error):
                raise
            in_float32 = None  # a kernel that exists in half precision only
        return self._fault(
            _SPOKEN.get(name, name), dtype, _cause(dtype, in_float32), given.range,
            value_range(answer), in_float32, is_planned,
        )  # fmt: skip


@dataclass(frozen=True)
class _Seen:
    """Operands of an operation: range, whether they hold NaN, and the faults they come from."""

    range: Range
    has_nan: bool
    origins: tuple[int, ...]

    @classmethod
    def of(cls, value: Any, origins_of: Callable[[Tensor], tuple[int, ...]]) -> _Seen:
        found = value_range(value)
        if found.is_finite:
            return cls(found, False, ())
        seen = [(each, value_range(each)) for each in iter_tensors(value)]
        bad = [each for each, own in seen if not own.is_finite]
        origins = {number for tensor in bad for number in origins_of(tensor)}
        return cls(found, any(math.isnan(own.low) for _, own in seen), tuple(origins))


def _has_infinite_number(operands: Any) -> bool:
    """Whether a Python float among the operands is not finite, such as a mask's fill value."""
    return any(type(each) is float and not math.isfinite(each) for each in tree_leaves(operands))


def _cause(dtype: torch.dtype, in_float32: Range | None) -> Cause:
    if in_float32 is None:
        return "unclear"
    if dtype.itemsize >= 4 or not in_float32.is_finite:
        return "formula"
    return "range" if in_float32.largest > torch.finfo(dtype).max else "kernel"


def _widen(value: Any) -> Any:
    """Replace half precision by float32, in tensors (copied) and in dtype arguments.

    The copies matter, because some operations write into their operands. A quantizer's tensors
    stay.
    """
    if isinstance(value, Tensor) and is_plain(value) and value.is_floating_point():
        return value.to(max(value.dtype, torch.float32, key=lambda each: each.itemsize), copy=True)
    if isinstance(value, torch.dtype) and value in (torch.float16, torch.bfloat16):
        return torch.float32
    return value
