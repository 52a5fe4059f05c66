"""`DCAE`, the video DC-AE: a deterministic autoencoder with 32x32 pixels and 4 frames per latent.

It is not causal: convolutions pad time with zeros on both sides. A single frame is one latent frame
and decodes to one frame. Parameter names are upstream's.
Source: hpcaitech/Open-Sora 7ad6a96, opensora/models/dc_ae; Chen et al., "Deep Compression
Autoencoder" (arXiv 2410.10733), and EfficientViT (arXiv 2205.14756) for its attention.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from everyframe.families.opensora2.vae_config import DCAEConfig
from everyframe.ops.dtypes import upcast_to_float32

#: Channels of a head's queries, of its keys and of its values.
_HEAD = 32
#: Width inside the feed-forward of an attention block, half of it for the gate.
_WIDER = 8
_EPS, _EPS_SUM = 1e-5, 1e-15


class RMSNorm3d(nn.Module):
    """Norm over the channels of each position, with statistics in float32 at least."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        wide = upcast_to_float32(x_BCTHW)
        norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        inverse = torch.rsqrt(norm.square() / x_BCTHW.shape[1] + _EPS)
        weight, bias = (each.view(-1, 1, 1, 1) for each in (self.weight, self.bias))
        return (wide * inverse * weight + bias).to(x_BCTHW.dtype)


class ConvLayer(nn.Module):
    """Convolution with zero padding, then a norm and SiLU if asked for."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: tuple[int, int, int] = (1, 1, 1),
        groups: int = 1,
        bias: bool = True,
        is_normed: bool = False,
        is_activated: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=bias
        )
        if is_normed:
            self.norm = RMSNorm3d(out_channels)
        self.act = nn.SiLU() if is_activated else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.norm(x) if hasattr(self, "norm") else x
        return cast(Tensor, self.act(x))


class Named(nn.Module):
    """Wrapper with a child `main`, for upstream's names; `forward` adds a residual."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.main(x))


class ConvPair(nn.Module):
    """Two convolutions of a residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvLayer(channels, channels, is_activated=True)
        self.conv2 = ConvLayer(channels, channels, bias=False, is_normed=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv2(self.conv1(x)))


class LinearAttention(nn.Module):
    """ReLU linear attention over all positions, at two scales, without a matrix of scores.

    A head has 96 channels: 32 each for queries, keys and values. Sums are float32 at least.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.qkv = ConvLayer(channels, wide, 1, bias=False)
        depthwise = nn.Conv3d(wide, wide, 5, padding=2, groups=wide, bias=False)
        mixing = nn.Conv3d(wide, wide, 1, groups=wide // _HEAD, bias=False)
        self.aggreg = nn.ModuleList([nn.Sequential(depthwise, mixing)])
        self.proj = ConvLayer(2 * channels, channels, 1, bias=False, is_normed=True)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        qkv = self.qkv(x_BCTHW)
        scales = torch.cat([qkv, *(each(qkv) for each in self.aggreg)], dim=1)
        heads = torch.unflatten(upcast_to_float32(scales).flatten(2), 1, (-1, 3 * _HEAD))
        q_BHDN, k_BHDN, v_BHDN = torch.split(heads, _HEAD, dim=2)
        q_BHDN, k_BHDN = q_BHDN.relu(), k_BHDN.relu()
        seen = (v_BHDN @ k_BHDN.mT) @ q_BHDN
        total = k_BHDN.sum(-1, keepdim=True).mT @ q_BHDN
        out = (
            (seen / (total + _EPS_SUM)).flatten(1, 2).view(x_BCTHW.shape[0], -1, *x_BCTHW.shape[2:])
        )
        return cast(Tensor, self.proj(out.to(scales.dtype)))


class GatedConv(nn.Module):
    """Feed-forward of an attention block: pointwise, depthwise, gate, pointwise."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = _WIDER * channels
        self.inverted_conv = ConvLayer(channels, wide, 1, is_activated=True)
        self.depth_conv = ConvLayer(wide, wide, groups=wide)
        self.gate = nn.SiLU()
        self.point_conv = ConvLayer(wide // 2, channels, 1, bias=False, is_normed=True)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.depth_conv(self.inverted_conv(x)).chunk(2, dim=1)
        return cast(Tensor, self.point_conv(value * self.gate(gate)))


class AttentionBlock(nn.Module):
    """Attention over all positions, then the gated feed-forward, both residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.context_module = Named(LinearAttention(channels))
        self.local_module = Named(GatedConv(channels))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.local_module(self.context_module(x)))


def _factors(x_BCTHW: Tensor, changes_time: bool) -> tuple[int, int, int]:
    """Scale factors of time, rows and columns; a single frame stays one."""
    return (2 if changes_time and x_BCTHW.shape[2] > 1 else 1, 2, 2)


class Downsample(nn.Module):
    """Strided convolution, plus the mean of the pixels that are merged into one."""

    def __init__(self, in_channels: int, out_channels: int, *, halves_time: bool) -> None:
        super().__init__()
        # Of a single frame, every stride along time gives that frame.
        self.main = ConvLayer(in_channels, out_channels, stride=(1 + halves_time, 2, 2))
        self.out_channels, self.halves_time = out_channels, halves_time

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        rt, rh, rw = _factors(x_BCTHW, self.halves_time)
        pattern = "b c (t rt) (h rh) (w rw) -> b (c rt rh rw) t h w"
        folded = rearrange(x_BCTHW, pattern, rt=rt, rh=rh, rw=rw)
        return cast(Tensor, self.main(x_BCTHW) + _group_means(folded, self.out_channels))


class ProjectOut(nn.Module):
    """Last layer of the encoder: a convolution, plus the means of consecutive channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.main = nn.Module()
        self.main.op_list = nn.ModuleList([ConvLayer(in_channels, out_channels)])
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.main.op_list[0](x) + _group_means(x, self.out_channels))  # type: ignore[index,operator]


class ProjectIn(nn.Module):
    """First layer of the decoder: a convolution, plus each channel repeated."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.main = ConvLayer(in_channels, out_channels)
        self.repeats = out_channels // in_channels

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.main(x) + x.repeat_interleave(self.repeats, dim=1))


class Upsample(nn.Module):
    """Nearest-neighbour upsampling and a convolution, plus channels rearranged to pixels."""

    def __init__(self, in_channels: int, out_channels: int, *, doubles_time: bool) -> None:
        super().__init__()
        self.main = nn.Module()
        self.main.conv = ConvLayer(in_channels, out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.doubles_time = doubles_time

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        rt, rh, rw = factors = _factors(x_BCTHW, self.doubles_time)
        larger = F.interpolate(x_BCTHW, scale_factor=tuple(map(float, factors)), mode="nearest")
        repeats = self.out_channels * math.prod(factors) // self.in_channels
        pattern = "b (c rt rh rw) t h w -> b c (t rt) (h rh) (w rw)"
        repeated = x_BCTHW.repeat_interleave(repeats, dim=1)
        unfolded = rearrange(repeated, pattern, rt=rt, rh=rh, rw=rw)
        return cast(Tensor, self.main.conv(larger) + unfolded)  # type: ignore[operator]


def _group_means(x_BCTHW: Tensor, num_groups: int) -> Tensor:
    """Mean of each of `num_groups` groups of consecutive channels."""
    return torch.unflatten(x_BCTHW, 1, (num_groups, -1)).mean(2)


class Stage(nn.Module):
    """Layers that run one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.op_list:
            x = layer(x)
        return x


def _blocks(config: DCAEConfig, stage: int, depth: int) -> list[nn.Module]:
    width = config.widths[stage]
    if config.attention[stage]:
        return [AttentionBlock(width) for _ in range(depth)]
    return [Named(ConvPair(width)) for _ in range(depth)]


class Encoder(nn.Module):
    """Pixels (B, 3, T, H, W) to latents."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.project_in = ConvLayer(config.in_channels, widths[0])
        stages = []
        for index, depth in enumerate(config.encoder_depths):
            layers = _blocks(config, index, depth)
            if index + 1 < len(widths):
                halves_time = config.time[index]
                layers.append(Downsample(widths[index], widths[index + 1], halves_time=halves_time))
            stages.append(Stage(*layers))
        self.stages = nn.ModuleList(stages)
        self.project_out = ProjectOut(widths[-1], config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project_in(x)
        for stage in self.stages:
            x = stage(x)
        return cast(Tensor, self.project_out(x))


class Decoder(nn.Module):
    """Latents to pixels (B, 3, T, H, W); stages run from the last to the first."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.project_in = ProjectIn(config.latent_channels, widths[-1])
        stages = []
        for index, depth in enumerate(config.decoder_depths):
            layers = _blocks(config, index, depth)
            if index + 1 < len(widths):
                doubles_time = config.time[index]
                layers.insert(
                    0, Upsample(widths[index + 1], widths[index], doubles_time=doubles_time)
                )
            stages.append(Stage(*layers))
        self.stages = nn.ModuleList(stages)
        last = ConvLayer(widths[0], config.in_channels)
        self.project_out = Stage(RMSNorm3d(widths[0]), nn.ReLU(), last)

    def forward(self, z: Tensor) -> Tensor:
        z = self.project_in(z)
        for stage in reversed(self.stages):
            z = stage(z)
        return cast(Tensor, self.project_out(z))


class DCAE(nn.Module):
    """The autoencoder of one tile; `vae` splits videos into tiles."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
