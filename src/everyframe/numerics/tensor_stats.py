"""Watching: the least and the largest value of tensors, in one reduction each and one look.

`torch.aminmax` carries NaN through, so the two numbers tell of every value that is not finite, and
of magnitude and constancy besides. What is done about it is not here. Read next:
`fault_locator.py`, which finds where such a value came from; `everyframe.runtime.guard`, which
acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Range:
    """The least and the largest value; both NaN where any value is."""

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        """Whether every value is a number and none is infinite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """The largest magnitude; NaN where any value is."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        return "not a number" if math.isnan(self.low) else f"{self.low:.3g} .. {self.high:.3g}"


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors with elements in it, inside of tuples, mappings and dataclasses too."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from iter_tensors(getattr(value, field.name))


def value_range(value: Any) -> Range:
    """The range of all floating tensors in `value`; 0 to 0 where there are none.

    The device is waited for once, however many tensors there are.
    """
    # Not float64, which MPS has not; float32 holds every half precision value. In eight bits torch
    # can't compare.
    held = (each if each.dtype.itemsize > 1 else each.float() for each in iter_tensors(value))
    ends = [torch.stack(torch.aminmax(tensor)).float() for tensor in held]
    if not ends:
        return Range(0.0, 0.0)
    together = torch.stack([end.to(ends[0].device) for end in ends])
    low, high = torch.stack([together[:, 0].amin(), together[:, 1].amax()]).tolist()
    return Range(low, high)


def blank_frames(pixels_TCHW: Tensor, low: float, high: float, tolerance: float) -> list[int]:
    """The frames of one colour: in each channel, values cut to `low`..`high` differ by less.

    The colour may be any: black, grey, green.
    """
    rows = pixels_TCHW.flatten(2)
    # Along a dimension, a CPU does these two ten times as fast as aminmax (measured, torch 2.13).
    least, most = rows.amin(2), rows.amax(2)
    spread = (most.clamp(low, high) - least.clamp(low, high)).amax(1)
    return torch.nonzero(spread < tolerance).flatten().tolist()


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference, and that divided by the reference's largest magnitude.

    Both are infinite where one side has a value that is not finite and the other hasn't the same.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"absolute {self.absolute:.2e}, relative {self.relative:.2e}"


def largest_error(got: Tensor, want: Tensor) -> Difference:
    """The largest error of `got` against the reference `want`, computed in float64 on the CPU.

    Raises `ValueError` where the shapes differ: nothing is broadcast, since a result of another
    shape is wrong and not close. Two empty tensors differ by 0.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    a, b = (side.detach().cpu().to(torch.float64) for side in (got, want))
    same = (a == b) | (a.isnan() & b.isnan())  # equal infinities and NaNs are no error
    if bool(same.all()):
        return Difference(0.0, 0.0)
    error = torch.where(same, torch.zeros_like(a), (a - b).abs())
    absolute = float(error.max()) if bool(error.isfinite().all()) else math.inf
    size = float(torch.where(b.isfinite(), b, torch.zeros_like(b)).abs().max())
    return Difference(absolute, absolute / size if size > 0 else math.inf)


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
            ends = [torch.stack(torch.aminmax(each.detach())) for each in iter_tensors(result)]
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
