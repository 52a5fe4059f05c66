"""Convolutions by Winograd's algorithm or by two-dimensional kernels; see `cpu_modules`."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.fast_paths import path_sizes
from everyframe.ops.convolution import TemporalConv
from everyframe.ops.native import kernels
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
    """Whether every output has all inputs of its neighbours, zeros beyond the edge."""
    return (
        set(conv.stride) == set(conv.dilation) == {1}
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def is_temporal(part: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Whether it is a convolution over time only, or over single pixels of frames."""
    return (
        isinstance(part, nn.Conv3d)
        and _is_usual(part)
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


class TemporalTorchConv2d(nn.Conv3d):
    """A convolution over time as one of two dimensions: oneDNN has kernels for those."""

    is_plain = False

    def forward(self, x_NCTHW: Tensor) -> Tensor:
        if self.is_plain or x_NCTHW.ndim != 5 or not multiplies(x_NCTHW, self.weight):
            return super().forward(x_NCTHW)
        return convolve_over_time(x_NCTHW, self, int(self.padding[0]))


class TemporalConv2d(TemporalTorchConv2d, TemporalConv):
    """The same, that accepts input without pixels."""


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution whose weight lies in memory as oneDNN reads it, and is not copied each time."""

    is_plain = False
    moves_its_weight = True  # see `everyframe.runtime.component_state`

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        is_last = weight.is_contiguous(memory_format=torch.channels_last)
        if not self.is_plain and not is_last and multiplies(x, weight):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        return super().forward(x)


class WinogradConv2d(nn.Conv2d):
    """A convolution of 3x3 by Winograd's algorithm, where the images are large enough for it."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        suits = x.ndim == 4 and x.dtype == self.weight.dtype and kernels.takes(x, self.weight)
        if self.is_plain or not suits or not saves_products(self, len(x), *x.shape[2:]):
            return super().forward(x)
        return kernels.winograd(x, self.weight, self.bias)


class WinogradChannelsLastConv2d(WinogradConv2d, ChannelsLastConv2d):
    """The same for one whose weight lies as oneDNN reads it, which computes small images."""


class WinogradConv3d(nn.Conv3d):
    """A convolution of Tx3x3 as T of 3x3 over shifted frames, by Winograd's algorithm."""

    is_plain = False

    def forward(self, x_NCTHW: Tensor) -> Tensor:
        around, pad, _ = (int(each) for each in self.padding)
        if self.is_plain or not suits_winograd(self, x_NCTHW, (around, around), pad):
            return super().forward(x_NCTHW)
        return kernels.winograd_3d(x_NCTHW, self.weight, self.bias, (around, around), pad)


def suits_winograd(conv: nn.Conv3d, x: Tensor, frame_padding: tuple[int, int], pad: int) -> bool:
    """Whether `kernels.winograd_3d` takes this input, and repays."""
    weight = conv.weight
    if x.ndim != 5 or x.dtype != weight.dtype or not kernels.takes(x, weight):
        return False
    samples, _, frames, height, width = x.shape
    frames += sum(frame_padding) + 1 - weight.shape[2]
    height, width = height + 2 * pad - 2, width + 2 * pad - 2
    is_there = min(frames, height, width, *(1 + each for each in frame_padding)) > 0
    return is_there and saves_products(conv, samples * frames, height, width)


class WinogradOverTime(nn.Conv3d):
    """A convolution of three frames by Winograd's algorithm over time, in float32.

    Its products are float32, so in bfloat16 half of them take as long as all of oneDNN's.
    """

    is_plain = False

    def forward(self, x_NCTHW: Tensor) -> Tensor:
        if self.is_plain or not _suits_winograd_over_time(self, x_NCTHW):
            return super().forward(x_NCTHW)
        padding = (int(self.padding[0]),) * 2
        return kernels.winograd_over_time(x_NCTHW, self.weight, self.bias, padding)


class WinogradTemporalConv(WinogradOverTime, TemporalConv):
    """The same, that accepts input without pixels."""


class WinogradTemporalTorchConv2d(WinogradOverTime, TemporalTorchConv2d):
    """The same, with few frames as one of two dimensions."""


class WinogradTemporalConv2d(WinogradOverTime, TemporalConv2d):
    """Both."""


def _suits_winograd_over_time(conv: nn.Conv3d, x: Tensor) -> bool:
    """Whether `kernels.winograd_over_time` takes this input, and repays."""
    weight = conv.weight
    if x.ndim != 5 or {weight.dtype, x.dtype} != {torch.float32} or not kernels.takes(x, weight):
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
    if isinstance(part, nn.Conv2d):
        return part.padding in ((1, 1), "same")
    return not isinstance(part.padding, str) and tuple(part.padding)[1:] in ((0, 0), (1, 1))
