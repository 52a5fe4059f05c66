"""Locate the operation that made a non-finite value, and the module it belongs to.

The call is replayed under a dispatch mode that sees every operation, while hooks track the
current module. An operation that turns finite operands into NaN or infinity is a fault; it is
repeated in float32 on the same operands, which tells the cause. Results computed from a non-finite
value inherit its faults. So the faults behind the final result are known at the end, and an
infinity that vanished (a mask, ``1 / exp(x)``) is not blamed. Slow: it runs only after a non-finite
result was found. `everyframe.runtime.stages.guard` repairs the fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from everyframe.hardware.device_loss import is_device_loss
from everyframe.hardware.memory import is_out_of_memory
from everyframe.numerics.tensor_stats import Range, iter_tensors, value_range
from everyframe.ops.attention import restore_kernels
from everyframe.ops.native.kernels import KernelMode

Cause = Literal["range", "kernel", "formula", "unclear", "compiled", "weights", "given"]

#: Operations that allocate uninitialised memory.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
             "new_empty_strided", "resize")  # fmt: skip

#: Argument names of tensors that may hold infinities on purpose.
_MASKS = ("mask", "bias")

#: Names of operations for messages, where torch's name is not the usual one.
_SPOKEN = {"to": "cast", "to_copy": "cast", "addmm": "linear"}

#: Most faults that one value inherits; the likeliest are kept.
_MOST = 8


@dataclass(frozen=True)
class Fault:
    """An operation that made a non-finite value.

    `cause` is one of:
      ``range``: the float32 result is finite, but above the largest value of `dtype`;
      ``kernel``: the float32 result is finite and fits into `dtype`, so this kernel is wrong or
          accumulates too narrowly;
      ``formula``: the float32 result is not finite either;
      ``unclear``: the operation can't be repeated in float32;
      ``compiled``: the same block is finite without compilation;
      ``weights``: no operation; `module` names a tensor that is not finite itself;
      ``given``: no operation; `operation` names the non-finite input of the call.

    Attributes:
        part: component; empty outside of all components.
        module: dotted name, within the component, of the innermost module that ran; may be empty.
        operation: name of the operation.
        dtype: dtype of a cast's result, otherwise the narrowest floating dtype involved.
        given: range of the operands.
        made: range of the result.
        wide: range of the result in float32, or without compilation.
        is_planned: -inf was written on purpose, as in a mask, or memory was uninitialised. It
            counts as a fault only if there is no other.
    """

    part: str
    module: str
    operation: str
    cause: Cause
    dtype: torch.dtype
    given: Range
    made: Range
    wide: Range | None
    is_planned: bool = False

    @property
    def place(self) -> str:
        """Component and module, as one dotted name."""
        return ".".join(name for name in (self.part, self.module) if name) or "around the model"


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
    run = _Run({**faults_of_inputs(parts, given), **_of_weights(parts)})
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
            seen, own = value_range(tensor), name.removeprefix(f"{part}.")
            fault = Fault(part, own, "", "weights", tensor.dtype, seen, seen, None)
            found[_storage(tensor)] = fault
    return found


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
                found[_storage(tensor)] = fault
    return found


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's memory while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


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
def _follow(parts: Mapping[str, nn.Module], run: _Run) -> Iterator[None]:
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


class _Run(KernelMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees every operation and tracks which faults each result comes from.

    `known` are faults of memory that was non-finite before the call. Faults are tracked by storage;
    a storage that is reused for a new tensor drops its old faults.
    """

    #: Torch asks each mode this for operators without a schema, such as flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, because flex_attention compiles itself, which torch refuses in any other mode."""
        return True

    def __init__(self, known: Mapping[int, Fault]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self._known = known
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
        inputs = {_storage(each) for each in iter_tensors(given)}
        for tensor in iter_tensors(result):
            if _storage(tensor) in inputs or value_range(tensor).is_finite:
                continue
            if not self._origins_of(tensor):
                seen = _Seen.of(given, self._origins_of)
                made = self._fault("hook", tensor.dtype, "formula", seen.range, value_range(tensor))
                self._origins[_storage(tensor)] = (self._add(made),)
        self._is_looking = False

    def note_kernel(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Record the faults of a kernel in C, and forget those of what was in its memory before."""
        self._is_looking = True
        given, made = _Seen.of(inputs, self._origins_of), value_range(output)
        self._origins.pop(_storage(output), None)
        if not made.is_finite:
            fault = self._fault("a kernel in C", output.dtype, "unclear", given.range, made)
            self._origins[_storage(output)] = given.origins or (self._add(fault),)
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
        is_nan_made = math.isnan(made.low) and not given.has_nan
        if not origins or (is_nan_made and all(self.faults[each].is_planned for each in origins)):
            # A mask has infinite inputs or an infinite number among its operands.
            is_put = not given.range.is_finite or _has_infinite_number(operands)
            is_planned = name in _UNFILLED or (is_put and math.isfinite(made.high))
            fault = self._judge(func, name, operands, wide, given, answer, is_planned)
            origins = self._sort((*origins, self._add(fault)))
        for tensor in iter_tensors(answer):
            if not value_range(tensor).is_finite:
                held = self._origins.get(_storage(tensor), ()) if mutates else ()
                self._origins[_storage(tensor)] = self._sort({*held, *origins})
        return answer

    def _forget(self, operands: Any, answer: Any) -> None:
        """Drop faults of memory that was reused for a new tensor."""
        if self._origins:
            held = {_storage(each) for each in iter_tensors(operands)}
            for tensor in iter_tensors(answer):
                if _storage(tensor) not in held:
                    self._origins.pop(_storage(tensor), None)

    def _origins_of(self, tensor: Tensor) -> tuple[int, ...]:
        memory = _storage(tensor)
        if memory not in self._origins and memory in self._known:
            self._origins[memory] = (self._add(self._known[memory]),)
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
        name, cause, made = _SPOKEN.get(name, name), _cause(dtype, in_float32), value_range(answer)
        return self._fault(name, dtype, cause, given.range, made, in_float32, is_planned)


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

    The copies matter, because some operations write into their operands.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(max(value.dtype, torch.float32, key=lambda each: each.itemsize), copy=True)
    if isinstance(value, torch.dtype) and value in (torch.float16, torch.bfloat16):
        return torch.float32
    return value
