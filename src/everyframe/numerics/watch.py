"""Watching: the least and the largest value of tensors, in one reduction each and one look.

`torch.aminmax` carries NaN through, so the two numbers tell of every value that is not finite, and
of magnitude and constancy besides. What is done about it is not here. Read next: `locate.py`,
which finds where such a value came from; `everyframe.families.guarding`, which acts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors with elements in it, inside of tuples, mappings and dataclasses too."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def range_of(value: Any) -> Range:
    """The range of all floating tensors in `value`; 0 to 0 where there are none.

    The device is waited for once, however many tensors there are.
    """
    # Not float64, which MPS has not; float32 holds every half precision value. In eight bits torch
    # can't compare.
    held = (each if each.dtype.itemsize > 1 else each.float() for each in tensors_in(value))
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
