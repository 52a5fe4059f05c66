"""Convolutions by Winograd's algorithm or by two-dimensional kernels; see `cpu_modules`.

The classes override `_conv_forward`, to which torch's `forward` gives its input, weight and bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.fast_paths import path_sizes
from everyframe.ops.native import convolutions, kernels
from everyframe.ops.native.convolutions import Padding
from everyframe.precision.dtypes import dtype_name


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's kernels suit: on a CPU, in a dtype of theirs, in a run."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in kernels.DTYPES
        and 0 not in x.shape
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _is_usual(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether every output has all inputs of its neighbours."""
    return set(conv.stride) == set(conv.dilation) == {1} and conv.groups == 1


def is_temporal(part: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Whether it is a convolution over time only, or over single pixels of frames."""
    return (
        isinstance(part, nn.Conv3d)
        and _is_usual(part)
        and part.padding_mode == "zeros"
        and part.kernel_size[1:] == (1, 1)
        and not isinstance(part.padding, str)
        and tuple(part.padding)[1:] == (0, 0)
    )


def convolve_over_time(x_NCTHW: Tensor, conv: nn.Conv3d, padding: int) -> Tensor:
    """The convolution as one of two dimensions, time and pixels; zero frames at both ends."""
    sizes = x_NCTHW.shape[-2:]
    zeros: Any = (padding, 0)
    y = F.conv2d(x_NCTHW.flatten(3), conv.weight[..., 0], conv.bias, padding=zeros)
    return torch.unflatten(y, -1, sizes)


class TemporalConv2d(nn.Conv3d):
    """A convolution over time as one of two dimensions: oneDNN has kernels for those."""

    is_plain = False

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_plain or x.ndim != 5 or not multiplies(x, weight):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        return convolve_over_time(x, self, int(self.padding[0]))


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution whose weight lies in memory as oneDNN reads it, and is not copied each time."""

    is_plain = False
    moves_its_weight = True  # see `everyframe.runtime.components.component_state`

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == weight.dtype:
            self.move_weight()
        plain: Tensor = super()._conv_forward(x, weight, bias)
        return plain

    def move_weight(self) -> None:
        """Lay the weight so, as the first call does; compiled code takes it as it lies."""
        weight = self.weight
        is_last = weight.is_contiguous(memory_format=torch.channels_last)
        if not self.is_plain and not is_last and multiplies(weight, weight):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def move_weights(module: nn.Module) -> None:
    """Lay weights as the first call of these convolutions would."""
    for part in module.modules():
        if isinstance(part, ChannelsLastConv2d):
            part.move_weight()


class WinogradConv2d(nn.Conv2d):
    """A convolution of 3x3 by Winograd's algorithm, where the images are large enough for it."""

    is_plain = False

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        suits = x.ndim == 4 and x.dtype == weight.dtype and kernels.supports(x, weight)
        if self.is_plain or not suits or not self._repays(x):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        return convolutions.winograd(x, weight, bias, self.padding_mode)

    def _repays(self, x_NCHW: Tensor) -> bool:
        height, width = x_NCHW.shape[2:]
        is_small = min(height, width) < 2 and self.padding_mode == "reflect"
        return not is_small and saves_products(self, len(x_NCHW), height, width)


class WinogradConv3d(nn.Conv3d):
    """A convolution of Tx3x3 as T of 3x3 over shifted frames, by Winograd's algorithm.

    A causal convolution that holds it may leave the padding to it, if it `suits` the input.
    """

    is_plain = False

    def suits(self, x: Tensor, padding: Padding) -> bool:
        """Whether a call with this input and padding can be computed, and repays."""
        history = x if padding.history is None else padding.history
        if self.is_plain or x.ndim != 5 or not x.dtype == history.dtype == self.weight.dtype:
            return False
        (samples, _, *sizes), taps = x.shape, self.kernel_size[0]
        if not kernels.supports(x, self.weight) or not padding.can_pad(sizes, taps):
            return False
        frames, height, width = padding.sizes_after(sizes, taps)
        return saves_products(self, samples * frames, height, width)

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        *args: Any,
        padding: Padding | None = None,
    ) -> Tensor:
        if padding is None:
            plain: Tensor = super().forward(input, *args)
            return plain
        return convolutions.winograd_3d(input, self.weight, self.bias, padding)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        around, pad, _ = (int(each) for each in self.padding)
        padding = Padding((around, around), pad, self.padding_mode)
        if not self.suits(x, padding):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        return convolutions.winograd_3d(x, weight, bias, padding)


class WinogradOverTime(nn.Conv3d):
    """A convolution of three frames by Winograd's algorithm over time, in float32.

    Its products are float32, so in bfloat16 half of them take as long as all of oneDNN's.
    """

    is_plain = False

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_plain or not _suits_winograd_over_time(self, x):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        padding = (int(self.padding[0]),) * 2
        return convolutions.winograd_over_time(x, weight, bias, padding)


#: By fast path: the classes that convolutions become, each a subclass of torch's.
CONVOLUTIONS: Mapping[str, Sequence[Any]] = {
    "temporal-conv": (TemporalConv2d,),
    "temporal-winograd": (WinogradOverTime,),
    "channels-last": (ChannelsLastConv2d,),
    "winograd": (WinogradConv2d, WinogradConv3d),
}

#: Definitions of `_conv_forward` that compute the convolution and nothing else.
_KNOWN = {each._conv_forward for each in (nn.Conv2d, nn.Conv3d, *chain(*CONVOLUTIONS.values()))}


@cache
def convolution_kind(path: str, own: Any) -> type[nn.Module] | None:
    """The class that a convolution of this class becomes; None if the path has none for it.

    A subclass of torch's keeps its own `forward`, as the causal ones of diffusers' autoencoders
    pad in theirs. What torch calls at its end is ours.
    """
    if getattr(own, "_conv_forward", None) not in _KNOWN:
        return None
    for kind in CONVOLUTIONS[path]:
        (plain,) = kind.__bases__
        if own is plain:
            found: type[nn.Module] = kind
            return found
        if issubclass(own, plain) and not issubclass(own, kind):
            return type(f"{kind.__name__}_{own.__name__}", (kind, own), {"__module__": __name__})
    return None


def _suits_winograd_over_time(conv: nn.Conv3d, x: Tensor) -> bool:
    """Whether `convolutions.winograd_over_time` takes this input, and repays."""
    weight = conv.weight
    if x.ndim != 5 or {weight.dtype, x.dtype} != {torch.float32} or not kernels.supports(x, weight):
        return False
    samples, _, frames, height, width = x.shape
    frames += 2 * int(conv.padding[0]) - 2
    return frames > 0 and path_sizes.saves_products_over_time(frames, samples * height * width)


def is_winograd_over_time(part: nn.Module) -> bool:
    """Whether it is a convolution of three frames, with channels enough."""
    return (
        is_temporal(part)
        and part.kernel_size[0] == 3
        and min(part.in_channels, part.out_channels) >= path_sizes.FEWEST_CHANNELS
    )


def saves_products(conv: nn.Conv2d | nn.Conv3d, images: int, height: int, width: int) -> bool:
    """See `path_sizes.saves_products`."""
    inputs, dtype = conv.weight[0, ..., 0, 0].numel(), dtype_name(conv.weight.dtype)
    return path_sizes.saves_products(dtype, inputs, images, height, width)


def is_winograd(part: nn.Module) -> bool:
    """Whether it is a convolution of 3x3, over frames too, with channels enough."""
    if not isinstance(part, (nn.Conv2d, nn.Conv3d)) or not _is_usual(part):
        return False
    if (
        part.kernel_size[-2:] != (3, 3)
        or min(part.in_channels, part.out_channels) < path_sizes.FEWEST_CHANNELS
    ):
        return False
    if part.padding_mode not in convolutions.PIXELS:
        return False
    if isinstance(part, nn.Conv2d):
        return part.padding in ((1, 1), "same")
    if isinstance(part.padding, str) or tuple(part.padding)[1:] not in ((0, 0), (1, 1)):
        return False
    return part.padding_mode == "zeros" or part.padding[0] == 0
