"""The largest value that each module gives, call by call, for a picture of where numbers grew.

Hooks from outside; what is computed stays the same to the bit. One reduction a call, brought to the
host some hundreds at a time. Not here: fingerprints that two runs are compared by (`trace`).
Read next: `heat_map.py`, which draws it; `everyframe.engine.reporting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.numerics.watch import tensors_in

#: So many numbers wait on the device before they are brought to the host together.
_WAITING = 256


class Magnitudes:
    """Watches modules from `watch` on until `remove`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._waiting: list[tuple[list[float], Tensor]] = []
        self._values: dict[str, dict[str, list[float]]] = {}

    def watch(self, component: str, module: nn.Module) -> None:
        """Watch a component and all in it; the same name may come again, and goes on then."""
        of_component = self._values.setdefault(component, {})
        for name, part in module.named_modules():
            values = of_component.setdefault(name, [])
            self._handles.append(part.register_forward_hook(self._after(values)))

    def remove(self) -> None:
        """Take all hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def components(self) -> tuple[str, ...]:
        """Those of which something was called."""
        self._bring()
        return tuple(name for name, parts in self._values.items() if any(parts.values()))

    def table(self, component: str) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
        """Modules that were called, and for each (row) the largest value of each call (column).

        Infinity where values were not finite, NaN where there was no such call. Repeated calls,
        where something was repaired, are calls as well.
        """
        self._bring()
        called = {name: each for name, each in self._values[component].items() if each}
        width = max(map(len, called.values()), default=0)
        table = np.full((len(called), width), np.nan)
        for row, values in enumerate(called.values()):
            finite = [each if math.isfinite(each) else math.inf for each in values]
            table[row, : len(values)] = finite
        return tuple(called), table

    def _after(self, values: list[float]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            ends = [torch.stack(torch.aminmax(each.detach())) for each in tensors_in(result)]
            if ends:
                largest = torch.stack([end.float().abs().amax() for end in ends]).amax()
                self._waiting.append((values, largest))
                if len(self._waiting) >= _WAITING:
                    self._bring()

        return hook

    def _bring(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        numbers = torch.stack([each.to(waiting[0][1].device) for _, each in waiting]).tolist()
        for (values, _), number in zip(waiting, numbers, strict=True):
            values.append(number)
