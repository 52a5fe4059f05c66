"""Raising one module by a rung of precision, and lowering it again, from outside.

The ladder is float16, bfloat16 (the same range as float32, where the device computes in it),
float32. The module's parameters are cast, and what it is given in a narrower dtype is too; casts at
the edges of the modules inside it (`edges`) follow their parameters by themselves. What it returns
stays wide, as it may not fit into anything narrower. Read next: `everyframe.families.guarding`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.facts import DeviceFacts

#: Narrowest first.
_LADDER = (torch.float16, torch.bfloat16, torch.float32)


def next_rung(dtype: torch.dtype, device: DeviceFacts) -> torch.dtype | None:
    """The next wider dtype that this device computes in, None where there is none."""
    if dtype == torch.float16 and device.has_fast_bf16 and "bfloat16" in device.dtypes:
        return torch.bfloat16
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


class Raised:
    """A module put to `dtype` at least; `undo` gives every bit back, as widening loses none."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._before = [
            (parameter, parameter.dtype)
            for parameter in module.parameters()
            if is_below(parameter.dtype, dtype)
        ]
        for parameter, _ in self._before:
            parameter.data = parameter.data.to(dtype)
        # The first of all hooks: later ones cast to the parameters' dtype, where there are any.
        self._handle = module.register_forward_pre_hook(
            _WidenInputs(dtype), prepend=True, with_kwargs=True
        )

    def undo(self) -> None:
        """The module as it was before."""
        self._handle.remove()
        for parameter, dtype in self._before:
            parameter.data = parameter.data.to(dtype)
        self._before = []


def is_below(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` is a rung below `other`."""
    return dtype in _LADDER and other in _LADDER and _LADDER.index(dtype) < _LADDER.index(other)


def narrowest(module: nn.Module) -> torch.dtype | None:
    """The lowest rung that a parameter of the module stands on; None without any."""
    rungs = [_LADDER.index(p.dtype) for p in module.parameters() if p.dtype in _LADDER]
    return _LADDER[min(rungs)] if rungs else None


class _WidenInputs:
    """Casts narrower floating inputs to `dtype`."""

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
