"""Upcast a module to the next wider dtype, and undo it; applied from outside.

The ladder is float16, bfloat16 (float32's range, where the device computes in it), float32. The
module's parameters are cast, and narrower inputs too; casts at the edges of inner modules
(`cast_hooks`) follow their parameters. The output stays wide, as it may not fit a narrower dtype.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.facts import DeviceFacts
from everyframe.hardware.thread_state import has_casts, without_casts

#: Narrowest first.
_LADDER = (torch.float16, torch.bfloat16, torch.float32)

#: Attribute of a parameter that lists the dtypes it was upcast from; it moves with the parameter.
_RUNGS = "everyframe_raised_from"

#: Attribute of a narrowed parameter with its values in float32; it moves with the parameter.
_FLOAT32 = "everyframe_float32"


def next_rung(dtype: torch.dtype, device: DeviceFacts) -> torch.dtype | None:
    """Next wider dtype that this device computes in, or None."""
    if dtype == torch.float16 and device.has_fast_bf16 and "bfloat16" in device.dtypes:
        return torch.bfloat16
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def narrow_with_float32(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast a float32 parameter to `dtype`; its values stay, and upcasting to float32 restores them.

    On the host alone: nothing moves them to another device.
    """
    setattr(parameter, _FLOAT32, parameter.data)
    parameter.data = parameter.data.to(dtype)


def has_float32(module: nn.Module) -> bool:
    """Whether a module below float32 has the float32 values of its narrow parameters too."""
    return any(
        hasattr(each, _FLOAT32) and each.dtype != torch.float32 for each in module.parameters()
    )


class Upcast:
    """A module upcast to at least `dtype`; `undo` restores every bit.

    Rounded weights stay rounded, unless they were narrowed by `narrow_with_float32`.
    With `keeps_storage`, `undo` also restores the storage of each weight, which the owner's views,
    tied weights or optimizers may share. The old weights then stay in memory beside the wide ones,
    unless the module moves to another device meanwhile. Without it, only weights whose cast is
    lossy stay. If a cast fails, for want of memory, the module is restored at once.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, *, keeps_storage: bool = False
    ) -> None:
        self._before: list[tuple[nn.Parameter, torch.dtype, Tensor | None]] = []
        self._handles: list[RemovableHandle] = []
        self._casts = _CastsOff()
        self._module = module
        _leave_device(module)
        try:
            for parameter in module.parameters():
                if is_below(parameter.dtype, dtype):
                    self._cast(parameter, dtype, keeps_storage=keeps_storage)
        except BaseException:
            self.undo()
            raise
        # The first hook: later ones cast to the parameters' dtype, if any.
        self._handles.append(
            module.register_forward_pre_hook(_WidenInputs(dtype), prepend=True, with_kwargs=True)
        )
        if has_casts():  # a foreign pipeline under autocast
            self._handles += self._casts.apply(module)

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype, *, keeps_storage: bool) -> None:
        before, rungs = parameter.data, _rungs(parameter)
        exact = getattr(parameter, _FLOAT32, None) if dtype == torch.float32 else None
        # bfloat16 has the range, but not all the digits of float16.
        is_lossy = torch.finfo(dtype).eps > torch.finfo(before.dtype).eps
        # Earlier upcasts have storage of ours.
        is_kept = is_lossy or exact is not None or (keeps_storage and not rungs)
        parameter.data = before.to(dtype) if exact is None else exact
        self._before.append((parameter, before.dtype, before if is_kept else None))
        if exact is None:
            _set_rungs(parameter, (*rungs, before.dtype))

    def undo(self) -> None:
        """Restore the module."""
        for handle in self._handles:
            handle.remove()
        self._casts.leave()
        _leave_device(self._module)
        for parameter, dtype, kept in self._before:
            data = parameter.data if kept is None else kept.to(parameter.device)
            parameter.data = data.to(dtype)
            _set_rungs(parameter, _rungs(parameter)[:-1])
        self._before = []


def _leave_device(module: nn.Module) -> None:
    """Let a module that is on a device for a while leave it: it has its own parameters then.

    Those on the device are copies of them, and the next call makes new ones.
    """
    for hook in module._forward_pre_hooks.values():
        leave = getattr(hook, "leave_device", None)
        if leave is not None:
            leave()


def held_in(tensor: Tensor) -> torch.dtype:
    """Effective dtype of a tensor's values: its own, or the coarser one that it was upcast from.

    Upcasting restores no digits.
    """
    rungs = _rungs(tensor)
    if not rungs:
        return tensor.dtype
    return max((*rungs, tensor.dtype), key=lambda dtype: torch.finfo(dtype).eps)


def as_raised(fresh: Tensor, parameter: Tensor) -> Tensor:
    """Cast freshly loaded weights as `parameter` was: through the dtypes it was upcast from.

    The bits are then the same whether a weight stayed resident or was loaded again.
    """
    for dtype in (*_rungs(parameter), parameter.dtype):
        fresh = fresh.to(dtype)
    return fresh


def as_exact_as(parameter: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
    """Mark `other`, the replacement of `parameter`, as upcast from the same dtypes."""
    _set_rungs(other, _rungs(parameter))
    return other


def _rungs(parameter: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes that a parameter was upcast from, in order."""
    rungs: tuple[torch.dtype, ...] = getattr(parameter, _RUNGS, ())
    return rungs


def _set_rungs(parameter: nn.Parameter, rungs: tuple[torch.dtype, ...]) -> None:
    setattr(parameter, _RUNGS, rungs)


def is_below(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` is narrower than `other` on the ladder."""
    return dtype in _LADDER and other in _LADDER and _LADDER.index(dtype) < _LADDER.index(other)


def narrowest(module: nn.Module) -> torch.dtype | None:
    """Narrowest ladder dtype among the module's parameters; None without any."""
    rungs = [_LADDER.index(p.dtype) for p in module.parameters() if p.dtype in _LADDER]
    return _LADDER[min(rungs)] if rungs else None


class _CastsOff:
    """Disable a caller's autocast during a module's call, as it would narrow the result again."""

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._depth = 0

    def apply(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook the module."""
        enter = module.register_forward_pre_hook(self._enter, prepend=True)
        return [enter, module.register_forward_hook(self._leave, always_call=True)]

    def leave(self) -> None:
        """Restore autocast, also after an aborted call, for which torch runs no hook."""
        self._depth = 0
        self._inside.close()

    def _enter(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._inside.enter_context(without_casts())

    def _leave(self, *_: object) -> None:
        if self._depth == 1:
            self.leave()
        self._depth = max(self._depth - 1, 0)


class _WidenInputs:
    """Forward pre-hook that casts narrower floating inputs to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(self._wide(value) for value in args),
            {name: self._wide(value) for name, value in kwargs.items()},
        )

    def _wide(self, value: Any) -> Any:
        narrow = isinstance(value, Tensor) and is_below(value.dtype, self.dtype)
        return value.to(self.dtype) if narrow else value
