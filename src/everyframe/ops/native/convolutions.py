"""Convolutions in C by Winograd's algorithm, as functions of tensors; the rest as in `kernels`."""

from __future__ import annotations

from ctypes import c_long

import torch
from torch import Tensor

from everyframe.ops.native import kernels


def winograd(x_NCHW: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolution with a weight (O, C, 3, 3), stride 1 and padding 1, by Winograd's algorithm.

    Returns (N, O, H, W), channels last. All is computed in float32, with a quarter of the
    multiplications: the error is 1e-6 to 3e-6 in float32, and that of its rounding in bfloat16.
    """
    channels = x_NCHW.shape[1]
    if weight.shape[1:] != (channels, 3, 3) or weight.dtype != x_NCHW.dtype:
        given = f"{tuple(weight.shape)} in {weight.dtype}"
        raise ValueError(f"a weight (O, {channels}, 3, 3) in {x_NCHW.dtype} is needed, got {given}")
    return winograd_3d(x_NCHW.unsqueeze(2), weight.unsqueeze(2), bias, (0, 0), 1).squeeze(2)


def winograd_3d(
    x_NCTHW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    frame_padding: tuple[int, int],
    pad: int,
    history: Tensor | None = None,
    *,
    is_replicated: bool = False,
) -> Tensor:
    """Convolution with a weight (O, C, taps, 3, 3) and stride 1, as `winograd`.

    Pads so many frames before the first and after the last, and `pad` pixels (0 or 1) around each
    frame. Frames are zeros, but for the last of those before the first, which are the `history`
    (N, C, t, H, W) if there is one. Pixels are zeros, or repeat the edge if `is_replicated`.
    Returns (N, O, T, H, W), channels last.
    """
    samples, channels, *given = x_NCTHW.shape
    outputs, taps = weight.shape[0], weight.shape[2]
    if weight.shape[1:] != (channels, taps, 3, 3) or weight.dtype != x_NCTHW.dtype:
        needed = f"a weight (O, {channels}, T, 3, 3) in {x_NCTHW.dtype} is needed"
        raise ValueError(f"{needed}, got {tuple(weight.shape)} in {weight.dtype}")
    front, back = frame_padding
    frames, height, width = given
    sizes = (frames + front + back + 1 - taps, height + 2 * pad - 2, width + 2 * pad - 2)
    if min(sizes) < 1 or pad not in (0, 1) or min(frame_padding) < 0:
        raise ValueError(f"frames of {given} with a padding of {frame_padding} and {pad}")
    x_NCTHW = kernels.channels_last(x_NCTHW)
    before = _history(history, x_NCTHW, front)
    y = torch.empty((samples, *sizes, outputs), dtype=x_NCTHW.dtype).permute(0, 4, 1, 2, 3)
    kernels.call(
        "winograd", x_NCTHW, weight, _bias(bias, outputs), y, samples, (c_long * 3)(*given),
        (c_long * 3)(*sizes), channels, outputs, taps, front, pad, *before,
        is_replicated, (c_long * 5)(*weight.stride()), kernels.is_bf16(y), output=y,
    )  # fmt: skip
    return y


def _history(history: Tensor | None, x_NCTHW: Tensor, most: int) -> tuple[Tensor | None, int, int]:
    """The history as rows of channels, how many frames it has, and the numbers between two.

    A frame that is expanded over time, without a copy, is passed as it is.
    """
    if history is None:
        return None, 0, 0
    (*ends, frames, height, width), x = history.shape, x_NCTHW
    is_fit = [*ends, height, width] == [*x.shape[:2], *x.shape[3:]] and 0 < frames <= most
    if not is_fit or (history.dtype, history.device) != (x.dtype, x.device):
        given = f"{tuple(history.shape)} in {history.dtype}"
        raise ValueError(f"a history of {most} frames before {tuple(x.shape)}, got {given}")
    if frames > 1 and history.stride(2) == 0:
        return kernels.channels_last(history[:, :, :1]), frames, 0
    return kernels.channels_last(history), frames, x.shape[1] * height * width


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
