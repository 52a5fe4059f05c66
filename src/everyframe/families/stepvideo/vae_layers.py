"""Layers of Step-Video's autoencoder (`vae`), under upstream's parameter names.

Convolutions are causal in time; norms work on one frame at a time. Upstream splits large
convolutions along time, which changes no number.

Shapes: B batch, C channels, T frames, H and W rows and columns.
Source: stepfun-ai/Step-Video-T2V 675e08c, stepvideo/vae/vae.py (behaviour and names only).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from everyframe.ops.attention import AttentionCore

Memory: TypeAlias = "dict[nn.Module, Tensor]"
"""The last frames that each convolution was given, for a video that comes part by part.

What never looks ahead can be computed so, exactly: the frames before take the place of the zeros.
"""


class CausalConv3d(nn.Module):
    """3-D convolution with zero padding: in front only along time, on both sides in space."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1
    ) -> None:
        super().__init__()
        self.front = kernel_size - 1
        side = kernel_size // 2
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=(0, side, side)
        )

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        if self.front:
            before = None if memory is None else memory.get(self)
            if before is None:
                x_BCTHW = F.pad(x_BCTHW, (0, 0, 0, 0, self.front, 0))
            else:
                x_BCTHW = torch.cat((before, x_BCTHW), dim=2)
            if memory is not None:
                memory[self] = x_BCTHW[:, :, -self.front :].clone()
        y: Tensor = self.conv(x_BCTHW)
        return y


class FrameNorm(nn.GroupNorm):
    """Group norm of each frame separately: statistics never span time."""

    def __init__(self, num_channels: int, num_groups: int) -> None:
        super().__init__(num_groups, num_channels, eps=1e-5)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        frames = super().forward(rearrange(x_BCTHW, "b c t h w -> (b t) c h w"))
        return rearrange(frames, "(b t) c h w -> b c t h w", b=len(x_BCTHW))


class ResBlock(nn.Module):
    """Residual block: twice norm, SiLU, convolution; 1x1x1 shortcut if the width changes."""

    def __init__(self, in_channels: int, out_channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = FrameNorm(in_channels, num_groups)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = FrameNorm(out_channels, num_groups)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.activation = nn.SiLU()
        if in_channels != out_channels:
            self.nin_shortcut = CausalConv3d(in_channels, out_channels, 1)
        self.has_shortcut = in_channels != out_channels

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        h = self.conv1(self.activation(self.norm1(x_BCTHW)), memory)
        h = self.conv2(self.activation(self.norm2(h)), memory)
        y: Tensor = (self.nin_shortcut(x_BCTHW) if self.has_shortcut else x_BCTHW) + h
        return y


class CausalAttention(nn.Module):
    """Single-head causal attention over places, row by row, including the place itself."""

    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm = FrameNorm(channels, num_groups)
        self.q = CausalConv3d(channels, channels, 1)
        self.k = CausalConv3d(channels, channels, 1)
        self.v = CausalConv3d(channels, channels, 1)
        self.core = AttentionCore(is_causal=True)
        self.proj_out = CausalConv3d(channels, channels, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        h = self.norm(x_BCTHW)
        q, k, v = (
            rearrange(part(h), "b c t h w -> b 1 (t h w) c") for part in (self.q, self.k, self.v)
        )
        size = dict(zip("thw", x_BCTHW.shape[2:], strict=True))
        attended = rearrange(self.core(q, k, v), "b 1 (t h w) c -> b c t h w", **size)
        y: Tensor = x_BCTHW + self.proj_out(attended)
        return y


class MidBlock(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels, num_groups)
        self.attn_1 = CausalAttention(channels, num_groups)
        self.block_2 = ResBlock(channels, channels, num_groups)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        y: Tensor = self.block_2(self.attn_1(self.block_1(x_BCTHW)))
        return y


class SpatialDownsample(nn.Module):
    """Halve rows and columns, frame by frame, with one zero row below and column at the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        frames = F.pad(rearrange(x_BCTHW, "b c t h w -> (b t) c h w"), (0, 1, 0, 1))
        y: Tensor = rearrange(self.conv(frames), "(b t) c h w -> b c t h w", b=len(x_BCTHW))
        return y


class SpatiotemporalDownsample(nn.Module):
    """Halve frames (rounded up), rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=2)

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        assert memory is None, "halved in time, a video comes whole"
        y: Tensor = self.conv(x_BCTHW)
        return y


class SpatialUpsample(nn.Module):
    """Double rows and columns, frame by frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        frames = rearrange(x_BCTHW, "b c t h w -> (b t) c h w")
        frames = F.interpolate(frames, scale_factor=2.0, mode="nearest")
        y: Tensor = rearrange(self.conv(frames), "(b t) c h w -> b c t h w", b=len(x_BCTHW))
        return y


class SmoothingBlock(nn.Module):
    """Two convolutions after upsampling; their input is added before and after the last SiLU."""

    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, channels)
        self.norm1 = FrameNorm(channels, num_groups)
        self.conv2 = CausalConv3d(channels, channels)
        self.norm2 = FrameNorm(channels, num_groups)
        self.activation = nn.SiLU()

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        h = self.activation(self.norm1(self.conv1(x_BCTHW, memory)))
        h = self.norm2(self.conv2(h, memory))
        y: Tensor = self.activation(h + x_BCTHW) + x_BCTHW
        return y


class SpatiotemporalUpsample(nn.Module):
    """Double frames, rows and columns."""

    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.conv3d = SmoothingBlock(channels, num_groups)

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        doubled = F.interpolate(x_BCTHW, scale_factor=2.0, mode="nearest")
        y: Tensor = self.conv3d(doubled, memory)
        return y


class NamedWrapper(nn.Module):
    """Wrapper around a causal convolution, for upstream's parameter names."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(in_channels, out_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        y: Tensor = self.conv(x_BCTHW)
        return y


_GRID_IN_CHANNELS = "b (c ft fr fc) t h w -> b c (t ft) (h fr) (w fc)"


def space_to_channels(x_BCTHW: Tensor) -> Tensor:
    """Prepend a zero frame and fold each 2x2x2 into channels: (B, 8C, ., H/2, W/2)."""
    left, right = _GRID_IN_CHANNELS.split(" -> ")
    return rearrange(F.pad(x_BCTHW, (0, 0, 0, 0, 1, 0)), f"{right} -> {left}", ft=2, fr=2, fc=2)


def channels_to_space(x_BCTHW: Tensor) -> Tensor:
    """Inverse of `space_to_channels`, without the zero frame: T becomes 2T - 1."""
    return rearrange(x_BCTHW, _GRID_IN_CHANNELS, ft=2, fr=2, fc=2)[:, :, 1:]


def mean_of_channels(x_BCTHW: Tensor, channels: int) -> Tensor:
    """Reduce to `channels` channels, each the mean of equally many adjacent ones."""
    return torch.unflatten(x_BCTHW, 1, (channels, -1)).mean(dim=2)


def repeated_channels(x_BCTHW: Tensor, channels: int) -> Tensor:
    """Expand to `channels` channels by repeating each one equally often."""
    return x_BCTHW.repeat_interleave(channels // x_BCTHW.shape[1], dim=1)
