"""Replacements for diffusers' layers in the video UNet, with the same parameters and names.

Norms are replaced in the same way, by `everyframe.ops.norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.ops.activation import GatedGELU
from everyframe.ops.convolution import TemporalConv
from everyframe.ops.device import device_type, repeat_operations
from everyframe.ops.norm import Statistics


class FrameLayout:
    """Which frames and pixels this rank holds; this base class holds all of them.

    The statistics are for norms over all frames and pixels of a branch, computed from some frames
    (b, C, r, H, W) or from some pixels (b, C, T, h, w).
    """

    #: Blocks that get it can be compiled; a rank's share has state and can't.
    is_stateless = True

    frame_statistics: Statistics | None = None
    pixel_statistics: Statistics | None = None

    def over_time(self, x_brSC: Tensor, reader: nn.Module | None = None) -> Tensor:
        """Exchange frames for pixels, (b, T, s, C); `reader` is the next layer, if it is a matmul.

        The caller owns the result and may change it in place.
        """
        return x_brSC

    def over_space(self, x_bTsC: Tensor) -> Tensor:
        """Exchange pixels back for frames, (b, r, S, C)."""
        return x_bTsC

    def of_frames(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each local frame; broadcasts to (b, r, C)."""
        return table_BC[:, None]

    def of_pixels(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each local pixel; broadcasts to (b, T, s, C)."""
        return table_BC[:, None, None]


WHOLE = FrameLayout()


#: On a CPU, chunks of `_ROWS` tokens if the widened tensor would have more than `_MANY` elements.
#: The widened chunk then fits the CPU caches: with 128 channels, 28,672 tokens and bfloat16 on one
#: core, 83 ms instead of 109, and instead of 136 without in-place sums.
_ROWS = 2048
_MANY = 2**23


def gated_gelu(
    x: Tensor,
    widen: Callable[[Tensor], Tensor],
    narrow: Callable[[Tensor], Tensor],
    width: int,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """``narrow(activate(widen(x)))`` of tokens (..., C); `activate` makes `width` of twice as many.

    Computed in chunks of tokens, which changes no formula; the chunk size depends on shapes alone.
    """
    tokens = x.flatten(0, -2)
    if device_type(x) != "cpu" or tokens.shape[0] * 2 * width <= _MANY:
        return narrow(activate(widen(x)))
    pieces = torch.split(tokens, _ROWS)
    first = narrow(activate(widen(pieces[0])))
    out = first.new_empty(tokens.shape[0], first.shape[-1])
    out[:_ROWS] = first
    if x.is_meta:  # one piece stands for all that are alike
        with repeat_operations(tokens.shape[0] / _ROWS - 1):
            out[:_ROWS] = narrow(activate(widen(pieces[0])))
        pieces = pieces[:1]
    for number, piece in enumerate(pieces[1:], start=1):
        out[number * _ROWS : (number + 1) * _ROWS] = narrow(activate(widen(piece)))
    return out.reshape(*x.shape[:-1], out.shape[-1])


class GatedFeedForward(nn.Module):
    """diffusers' gated `FeedForward`, in chunks of tokens where there are many."""

    comes_whole = True
    gated_linear = ("net.0.proj", "activation")  # a fast path may fuse them
    net: Any

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        copy_children(theirs, self)
        self.activation = GatedGELU()

    def forward(self, tokens: Tensor) -> Tensor:
        gate, narrow = self.net[0], self.net[2]
        return gated_gelu(tokens, gate.proj, narrow, narrow.in_features, self.activation)


def copy_children(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the submodules of `source`, in their order and under their names."""
    for name, child in source.named_children():
        target.add_module(name, child)


def over_frames(conv: Any) -> TemporalConv:
    """The same convolution as a `TemporalConv`."""
    made = TemporalConv(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding)
    made.load_state_dict(conv.state_dict(), assign=True)
    return made
