"""Layers that stand in the video UNet for diffusers' own, of the same parameters and names.

Not here: norms, which are swapped in the same way (`everyframe.ops.norm`). Read next: `unet.py`.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from everyframe.ops.gated import gated_gelu


class GatedFeedForward(nn.Module):
    """diffusers' `FeedForward` with a gate, some tokens at a time where there are many."""

    comes_whole = True

    def __init__(self, net: nn.ModuleList) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        gate: Any = self.net[0]
        narrow: Any = self.net[2]
        return gated_gelu(tokens, gate.proj, narrow, narrow.in_features)


class OverFrames(nn.Conv3d):
    """A convolution over time alone, whose kernels refuse frames without a pixel.

    Who has no pixels calls it like all others, and gives what it was given.
    """

    def forward(self, x_bCThw: Tensor) -> Tensor:
        return x_bCThw if 0 in x_bCThw.shape else super().forward(x_bCThw)


def swap_layers(module: nn.Module) -> None:
    """Put these in the place of every feed-forward and convolution over time inside."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is FeedForward:
                net: Any = child.net
                setattr(parent, name, GatedFeedForward(net))
            elif type(child) is nn.Conv3d:
                setattr(parent, name, _over_frames(child))


def _over_frames(conv: Any) -> OverFrames:
    made = OverFrames(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding)
    made.load_state_dict(conv.state_dict(), assign=True)
    return made
