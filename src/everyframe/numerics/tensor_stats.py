"""Tensor statistics: minimum and maximum, largest error, per-module magnitudes.

`torch.aminmax` propagates NaN, so its two numbers reveal every non-finite value as well as
magnitude and constancy. Each tensor costs one reduction, each query one device synchronisation.
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

from everyframe.precision.plain_tensors import plain_tensors


@dataclass(frozen=True)
class Range:
    """Minimum and maximum; both NaN if any value is NaN."""

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        """Whether every value is finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """Largest magnitude; NaN if any value is NaN."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        return "not a number" if math.isnan(self.low) else f"{self.low:.3g} .. {self.high:.3g}"


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield non-empty floating tensors, also from tuples, lists, mappings and dataclasses.

    A quantizer's tensor stands for what it holds, such as its scales.
    """
    if isinstance(value, Tensor):
        for _, tensor in plain_tensors(value, ""):
            if tensor.is_floating_point() and tensor.numel():
                yield tensor
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
    """Range of all floating tensors in `value`; 0 to 0 without any.

    Synchronises with the device once, however many tensors there are.
    """
    # Not float64, which MPS lacks; float32 holds every half-precision value. torch can't compare
    # 8-bit floats.
    held = (each if each.dtype.itemsize > 1 else each.float() for each in iter_tensors(value))
    ends = [torch.stack(torch.aminmax(tensor)).float() for tensor in held]
    if not ends:
        return Range(0.0, 0.0)
    if len(ends) == 1:  # nearly always; on a card each operation more costs some 10 microseconds
        return Range(*ends[0].tolist())
    together = torch.stack([end.to(ends[0].device) for end in ends])
    low, high = torch.stack([together[:, 0].amin(), together[:, 1].amax()]).tolist()
    return Range(low, high)


def blank_frames(pixels_TCHW: Tensor, low: float, high: float, tolerance: float) -> list[int]:
    """Indices of single-coloured frames: each channel varies by less than `tolerance`.

    Values are first clamped to `low`..`high`. The colour may be any: black, grey, green.
    """
    rows = pixels_TCHW.flatten(2)
    # Along a dimension, a CPU does these two ten times as fast as aminmax (measured, torch 2.13).
    least, most = rows.amin(2), rows.amax(2)
    spread = (most.clamp(low, high) - least.clamp(low, high)).amax(1)
    return torch.nonzero(spread < tolerance).flatten().tolist()


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference, and that divided by the reference's largest magnitude.

    Both are infinite if a non-finite value on one side has no equal on the other.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"absolute {self.absolute:.2e}, relative {self.relative:.2e}"


def largest_error(got: Tensor, want: Tensor) -> Difference:
    """Largest error of `got` against the reference `want`, computed in float64 on the CPU.

    Raises `ValueError` if the shapes differ: nothing is broadcast, since a result of another shape
    is wrong and not close. Two empty tensors differ by 0.
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


#: Numbers buffered on the device before one copy to the host.
_WAITING = 256


class Magnitudes:
    """Record the largest magnitude of each module's output, from `watch` until `remove`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._waiting: list[tuple[list[float], Tensor]] = []
        self._values: dict[str, dict[str, list[float]]] = {}

    def watch(self, component: str, module: nn.Module) -> None:
        """Hook a component and its submodules.

        A name that was watched before continues its record.
        """
        of_component = self._values.setdefault(component, {})
        for name, part in module.named_modules():
            values = of_component.setdefault(name, [])
            self._handles.append(part.register_forward_hook(self._after(values)))

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def components(self) -> tuple[str, ...]:
        """Components with at least one recorded call."""
        self._bring()
        return tuple(name for name, parts in self._values.items() if any(parts.values()))

    def table(self, component: str) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
        """Modules that were called, and the largest value of each (row) per call (column).

        Infinity marks non-finite values, NaN a call that did not happen. Calls repeated by a repair
        count as calls.
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
