"""Convolutions in C by Winograd's algorithm, as functions of tensors; the rest as in `kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_long
from dataclasses import dataclass

from torch import Tensor

from everyframe.ops.native import kernels

#: What lies around a frame, in the words of torch's `padding_mode`.
PIXELS = ("zeros", "replicate", "reflect")


@dataclass(frozen=True)
class Padding:
    """What a convolution reads beyond its input, of which it needs no padded copy.

    Attributes:
        frames: number of them before the first and after the last.
        pad: pixels around each frame, 0 or 1.
        pixels: what those are, of `PIXELS`.
        history: the last of the frames before the first, (N, C, t, H, W).
        repeats_frames: whether other frames repeat the first or last one; else they are zeros.
    """

    frames: tuple[int, int]
    pad: int
    pixels: str = "zeros"
    history: Tensor | None = None
    repeats_frames: bool = False

    def can_pad(self, sizes: Sequence[int], taps: int) -> bool:
        """Whether frames (T, H, W) can be padded so, and leave something to compute."""
        earlier = 0 if self.history is None else self.history.shape[2]
        least = 2 if self.pixels == "reflect" else 1
        return (
            self.pixels in PIXELS
            and self.pad in (0, 1)
            and earlier <= self.frames[0]
            and self.frames[1] >= 0
            and min(sizes) > 0
            and min(sizes[1:]) >= least
            and min(self.sizes_after(sizes, taps)) > 0
        )

    def sizes_after(self, sizes: Sequence[int], taps: int) -> tuple[int, int, int]:
        """Frames, height and width of the result."""
        (frames, height, width), more = sizes, 2 * self.pad - 2
        return frames + sum(self.frames) + 1 - taps, height + more, width + more


def winograd(x_NCHW: Tensor, weight: Tensor, bias: Tensor | None, pixels: str = "zeros") -> Tensor:
    """Convolution with a weight (O, C, 3, 3), stride 1 and padding 1, by Winograd's algorithm.

    Returns (N, O, H, W), channels last. All is computed in float32, with a quarter of the
    multiplications: the error is 1e-6 to 3e-6 in float32, and that of its rounding in bfloat16.
    """
    channels = x_NCHW.shape[1]
    if weight.shape[1:] != (channels, 3, 3) or weight.dtype != x_NCHW.dtype:
        given = f"{tuple(weight.shape)} in {weight.dtype}"
        raise ValueError(f"a weight (O, {channels}, 3, 3) in {x_NCHW.dtype} is needed, got {given}")
    padding = Padding((0, 0), 1, pixels)
    return winograd_3d(x_NCHW.unsqueeze(2), weight.unsqueeze(2), bias, padding).squeeze(2)


def winograd_3d(x_NCTHW: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding) -> Tensor:
    """Convolution with a weight (O, C, taps, 3, 3) and stride 1, as `winograd`.

    Returns (N, O, T, H, W), channels last.
    """
    samples, channels, *given = x_NCTHW.shape
    outputs, taps = weight.shape[0], weight.shape[2]
    if weight.shape[1:] != (channels, taps, 3, 3) or weight.dtype != x_NCTHW.dtype:
        needed = f"a weight (O, {channels}, T, 3, 3) in {x_NCTHW.dtype} is needed"
        raise ValueError(f"{needed}, got {tuple(weight.shape)} in {weight.dtype}")
    if not padding.can_pad(given, taps):
        raise ValueError(f"frames of {given} with {padding}")
    sizes, history = padding.sizes_after(given, taps), padding.history
    if history is not None:
        shape = (samples, channels, history.shape[2], *given[1:])
        if history.shape != shape or (history.dtype, history.device.type) != (weight.dtype, "cpu"):
            found = f"{tuple(history.shape)} in {history.dtype}"
            raise ValueError(f"a history {shape} in {weight.dtype} is needed, got {found}")
        history = kernels.channels_last(history)
    x_NCTHW = kernels.channels_last(x_NCTHW)
    y = x_NCTHW.new_empty((samples, *sizes, outputs)).permute(0, 4, 1, 2, 3)
    kernels.call(
        "winograd", x_NCTHW, weight, _bias(bias, outputs), y, samples, (c_long * 3)(*given),
        (c_long * 3)(*sizes), channels, outputs, taps, padding.frames[0], padding.pad, history,
        0 if history is None else history.shape[2], padding.repeats_frames,
        PIXELS.index(padding.pixels), (c_long * 5)(*weight.stride()), kernels.is_bf16(y), output=y,
    )  # fmt: skip
    return y


def winograd_over_time(
    x_NCTHW: Tensor, weight: Tensor, bias: Tensor | None, frame_padding: tuple[int, int]
) -> Tensor:
    """Convolution over time with a weight (O, C, 3, 1, 1), with half of the multiplications.

    So many frames of zeros before the first and after the last; the rest as `winograd_3d`.
    """
    samples, channels, frames, height, width = x_NCTHW.shape
    outputs = weight.shape[0]
    if weight.shape[1:] != (channels, 3, 1, 1) or weight.dtype != x_NCTHW.dtype:
        needed = f"a weight (O, {channels}, 3, 1, 1) in {x_NCTHW.dtype} is needed"
        raise ValueError(f"{needed}, got {tuple(weight.shape)} in {weight.dtype}")
    made = frames + sum(frame_padding) - 2
    if made < 1 or min(frame_padding) < 0:
        raise ValueError(f"{frames} frames with a padding of {frame_padding}")
    x_NCTHW = kernels.channels_last(x_NCTHW)
    y = x_NCTHW.new_empty((samples, made, height, width, outputs)).permute(0, 4, 1, 2, 3)
    kernels.call(
        "winograd_over_time", x_NCTHW, weight, _bias(bias, outputs), y, samples, frames, made,
        height * width, channels, outputs, frame_padding[0],
        (c_long * 3)(*weight.stride()[:3]), kernels.is_bf16(y), output=y,
    )  # fmt: skip
    return y


def _bias(bias: Tensor | None, size: int) -> Tensor | None:
    return None if bias is None else kernels.floats(bias, size)
