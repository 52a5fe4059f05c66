"""Where a value that is not finite came from: the first operation that made one, and its module.

The call is repeated with every operation seen and the module on top of the stack known by hooks; it
ends at the first operation that makes NaN or infinity out of numbers. That operation is repeated
in float32 on the same operands, which says what kind of fault it is. Slow, and run after a hit
only. Not here: what is done about it (`everyframe.families.guarding`). Read next: `watch.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from everyframe.hardware.lost import is_lost
from everyframe.numerics.watch import Range, range_of, tensors_in
from everyframe.ops.attention import kernels_kept

_Result = TypeVar("_Result")

Cause = Literal["range", "kernel", "formula", "unclear", "compiled"]

#: What makes -inf on purpose (masks), or hands out memory that nobody has filled.
_ON_PURPOSE = (
    "full", "fill", "masked_fill", "where", "scalar_tensor", "empty", "new_empty", "new_full",
    "resize", "log",
)  # fmt: skip

#: What torch calls otherwise than a person does.
_SPOKEN = {"to": "cast", "to_copy": "cast", "addmm": "linear"}


@dataclass(frozen=True)
class Fault:
    """The first operation that made a value that is not finite.

    `part` is the component and `module` the dotted name in it of the innermost module that ran,
    both empty for what is outside of all of them. `cause` is ``range`` (the same in float32 is
    finite and beyond what `dtype` holds), ``kernel`` (in float32 it is finite and would fit into
    `dtype`: this kernel is wrong or adds up too narrowly), ``formula`` (not finite in float32
    either), ``unclear`` (it can't be repeated in float32) or ``compiled`` (the same block as it is
    written is finite). `given` and `made` are the ranges of operands and result, `wide` that of the
    result in float32, or as it is written.
    """

    part: str
    module: str
    operation: str
    cause: Cause
    dtype: torch.dtype
    given: Range
    made: Range
    wide: Range | None

    @property
    def place(self) -> str:
        """Component and module, as one dotted name."""
        return ".".join(name for name in (self.part, self.module) if name) or "around the model"


def locate(
    parts: Mapping[str, nn.Module], compute: Callable[[], _Result]
) -> tuple[Fault | None, _Result | None]:
    """Repeat `compute`, which calls these modules: the first fault, or None and the result."""
    run = _Run()
    try:
        with kernels_kept(), _eager(), _followed(parts, run.stack), run:
            return None, compute()
    except _Found:
        return run.fault, None


def bad_weights(parts: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    """Parameters and buffers with values that are not numbers, or infinite parameters, by name.

    Buffers may hold infinities on purpose, as masks do.
    """
    found = []
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:  # it waits in its file, and is looked at where it is used
                continue
            if not range_of(parameter.detach()).is_finite:
                found.append((f"{part}.{name}", parameter.detach()))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                found.append((f"{part}.{name}", buffer))
    return found


class _Found(BaseException):
    """Ends the repeated call; never leaves this module. No model's own handler may catch it."""


def _eager() -> AbstractContextManager[Any]:
    """What was compiled is run as it was written: to an onlooker it would be one operation."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and it takes seconds to import
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _followed(parts: Mapping[str, nn.Module], stack: list[tuple[str, str]]) -> Iterator[None]:
    """Keeps the component and dotted name of the module that runs on top of `stack`."""

    def entering(part: str, name: str) -> Callable[..., None]:
        return lambda *_: stack.append((part, name))

    def leaving(part: str, name: str) -> Callable[..., None]:
        def leave(*_: object) -> None:
            # A call that ended in somebody's hook before ours was never entered.
            if stack and stack[-1] == (part, name):
                stack.pop()

        return leave

    handles = []
    for part, whole in parts.items():
        for name, module in whole.named_modules():
            # Before casts at the edges, so that these count as the module's own.
            handles.append(module.register_forward_pre_hook(entering(part, name), prepend=True))
            after = module.register_forward_hook(leaving(part, name), always_call=True)
            handles.append(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation; ends the call at the first fault, which is then in `fault`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[tuple[str, str]] = []
        self.fault: Fault | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = (args, kwargs or {})
        mutates = func._schema.is_mutable
        # What is written into is gone afterwards, so it is looked at before.
        given = _Signs.of(operands) if mutates else None
        wide = tree_map(_widened, operands) if mutates else None
        answer = func(*args, **operands[1])
        name = func._schema.name.split("::")[1].strip("_")
        if name.startswith(_ON_PURPOSE) or range_of(answer).is_finite:
            return answer
        name = _SPOKEN.get(name, name)
        given = given or _Signs.of(operands)
        if _Signs.of(answer).are_new_to(given):
            self.fault = self._judged(func, name, operands, wide, given, answer)
            raise _Found
        return answer

    def _judged(
        self, func: Any, name: str, operands: Any, wide: Any, given: _Signs, answer: Any
    ) -> Fault:
        part, module = self.stack[-1] if self.stack else ("", "")
        floats = [*tensors_in(answer), *tensors_in(operands)]
        # A cast has the dtype that it casts to, everything else the narrowest that it works on.
        dtype = min((each.dtype for each in floats), key=lambda dtype: dtype.itemsize)
        args, kwargs = wide or tree_map(_widened, operands)
        in_float32: Range | None
        try:
            in_float32 = range_of(func(*args, **kwargs))
        except (RuntimeError, TypeError) as error:
            if is_lost(error):
                raise
            in_float32 = None  # a kernel that exists in half precision only
        made = range_of(answer)
        return Fault(part, module, name, _cause(dtype, in_float32), dtype, given.range, made,
                     in_float32)  # fmt: skip


@dataclass(frozen=True)
class _Signs:
    """Which kinds of values that are not finite there are."""

    range: Range
    has_nan: bool
    has_infinity: bool

    @classmethod
    def of(cls, value: Any) -> _Signs:
        found = range_of(value)
        if found.is_finite:
            return cls(found, False, False)
        tensors = list(tensors_in(value))
        nan = any(bool(tensor.isnan().any()) for tensor in tensors)
        return cls(found, nan, any(bool(tensor.isinf().any()) for tensor in tensors))

    def are_new_to(self, before: _Signs) -> bool:
        """Whether these arose here: NaN out of none, or infinity out of numbers alone."""
        if self.has_nan and not before.has_nan:
            return True
        return self.has_infinity and not (before.has_nan or before.has_infinity)


def _cause(dtype: torch.dtype, in_float32: Range | None) -> Cause:
    if in_float32 is None:
        return "unclear"
    if dtype.itemsize >= 4 or not in_float32.is_finite:
        return "formula"
    return "range" if in_float32.largest > torch.finfo(dtype).max else "kernel"


def _widened(value: Any) -> Any:
    """Half precision, also where it is asked for, in float32; copies, as some are written into."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(max(value.dtype, torch.float32, key=lambda each: each.itemsize), copy=True)
    if isinstance(value, torch.dtype) and value in (torch.float16, torch.bfloat16):
        return torch.float32
    return value
