"""The deep layers of a UNet, computed in some calls and taken from the last one in the others.

DeepCache (Ma et al. 2023, arXiv 2312.00858): features of the lower resolutions change slowly from
step to step. A shallow call computes the layers at full resolution alone: the first of the way
down, and the last `LAYERS` of the way up, which get what the deep ones gave last. It works for
every UNet with diffusers' names of blocks, ours among them, as modules are replaced from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.numerics.tensor_stats import iter_tensors
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.ops.dtypes import upcast_to_widest
from everyframe.precision.cast_hooks import map_tensors

#: Layers of the way up that a shallow call computes; one fewer of the way down, and its first
#: convolution, have the results of the same resolution that they take.
LAYERS = 2


def deep_modules(unet: Any) -> Iterator[nn.Module]:
    """The modules that a shallow call leaves out, none of them inside another."""
    first, last = unet.down_blocks[0], unet.up_blocks[-1]
    for name, layers in first.named_children():
        if isinstance(layers, nn.ModuleList):
            yield from layers if name == "downsamplers" else layers[LAYERS - 1 :]
    yield from unet.down_blocks[1:]
    if unet.mid_block is not None:
        yield unet.mid_block
    yield from unet.up_blocks[:-1]
    shallow = max(len(last.resnets) - LAYERS, 0)
    for layers in last.children():
        if isinstance(layers, nn.ModuleList) and len(layers) >= len(last.resnets):
            yield from layers[:shallow]


class _CallFeatures:
    """Results of the deep modules in one call; the last one alone is used, the others are sizes."""

    def __init__(self, sizes: tuple[torch.Size, ...]) -> None:
        self.sizes = sizes
        self.results: list[tuple[nn.Module, Any]] = []

    def add(self, module: nn.Module, result: Any) -> None:
        if self.results:
            before, size = self.results[-1]
            self.results[-1] = (before, map_tensors(size, _size_of))
        self.results.append((module, result))

    @property
    def last(self) -> Tensor | None:
        """What the shallow layers get."""
        return next(iter_tensors(self.results[-1][1]), None) if self.results else None


def _size_of(tensor: Tensor) -> Tensor:
    """A tensor of that size without memory of its own."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _relative_change(old: Tensor, new: Tensor) -> float:
    """Norm of the difference over the norm of `new`, in the widest dtype of the device.

    A frame at a time: float64 of all of them would take more memory than a call of the UNet.
    """
    change, size = upcast_to_widest(torch.zeros(2, device=new.device))
    for before, now in zip(old, new, strict=True):
        wide = upcast_to_widest(now)
        change += (wide - upcast_to_widest(before)).square().sum()
        size += wide.square().sum()
    return float((change / size).sqrt())


class DeepFeatures:
    """Context: calls of a UNet compute its deep layers, or with `is_shallow` take earlier results.

    A step may call the UNet several times, for each guidance branch. `begin` has to be called
    before each step, and each call has the results of the call of the same number.

    Attributes:
        is_shallow: whether calls are shallow where there are earlier results.
        drift: relative change of the deep results in the last whole step, the largest of its calls;
            None if there were no earlier ones.
    """

    def __init__(self, unet: nn.Module, is_paused: Callable[[], bool] = lambda: False) -> None:
        self._unet, self._is_paused = unet, is_paused
        self._calls: dict[int, _CallFeatures] = {}
        self._number = 0
        self._writing: _CallFeatures | None = None
        self._reading: Iterator[tuple[nn.Module, Any]] | None = None
        self._on = ExitStack()
        self.is_shallow = False
        self.drift: float | None = None

    @property
    def is_filled(self) -> bool:
        """Whether a shallow step has something to take."""
        return bool(self._calls)

    def has(self, number: int) -> bool:
        """Whether the call of that number has something to take."""
        return number in self._calls

    def begin(self, number: int = 0) -> None:
        """Begin a step, or begin it again, with its call of that number."""
        self._number = number

    def clear(self) -> None:
        """Drop all results."""
        self._calls.clear()
        self.drift = None

    def beginning(self, denoise: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``denoise``, each call of which begins a step."""

        def call(*given: Tensor) -> Tensor:
            self.begin()
            return denoise(*given)

        return call

    def __enter__(self) -> DeepFeatures:
        for module in deep_modules(self._unet):
            self._on.enter_context(override_call(module, self._deep))
        self._on.enter_context(override_call(self._unet, self._answer_call))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()
        self.clear()

    def _answer_call(self, call: ModuleCall) -> Any:
        if self._is_paused():  # for a repair, after which earlier results are other modules'
            self.clear()
            return call.compute()
        number, self._number = self._number, self._number + 1
        found = self._calls.get(number)
        sizes = tuple(each.shape for each in iter_tensors(call.args))
        if found is not None and found.sizes != sizes:
            found = None  # branches that were one call are several now, or the other way round
        try:
            if self.is_shallow and found is not None:
                self._reading = iter(found.results)
                return call.compute()
            self._writing = _CallFeatures(sizes)
            result = call.compute()
            self._note_drift(number, found, self._writing)
            self._calls[number] = self._writing
            return result
        finally:
            self._reading = self._writing = None

    def _note_drift(self, number: int, before: _CallFeatures | None, now: _CallFeatures) -> None:
        old, new = before.last if before is not None else None, now.last
        self.drift = None if number == 0 else self.drift
        if old is not None and new is not None:
            self.drift = max(_relative_change(old, new), self.drift or 0.0)

    def _deep(self, call: ModuleCall) -> Any:
        if self._reading is not None:
            module, result = next(self._reading)
            assert module is call.module, "a UNet calls its layers in the same order in every step"
            return result
        result = call.compute()
        if self._writing is not None:
            self._writing.add(call.module, result)
        return result
