"""Temporal stage of Open-Sora 1.2's video autoencoder: upstream's `VAE_Temporal`.

Causal 3-D convolutions over the latents of the spatial stage. Time is halved between some levels,
space never. One call codes one piece; `vae` cuts a video into pieces, runs the spatial stage and
normalises. Parameter names are upstream's.

Shapes: B batch, C channels, T frames, H and W latent rows and columns.
Source: hpcaitech/Open-Sora v1.2.0, opensora/models/vae/vae_temporal.py (behaviour and names only).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from everyframe.families.opensora.vae_config import TemporalVAEConfig


class CausalConv3d(nn.Module):
    """3-D convolution, causal in time: all temporal padding is zeros in front.

    With a stride there are ``kernel_size - time_stride`` zero frames, so output t depends on input
    up to ``(t + 1) * time_stride - 1``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        time_stride: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        side = kernel_size // 2
        self.padding = (side, side, side, side, kernel_size - time_stride, 0)
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel_size, stride=(time_stride, 1, 1), bias=bias
        )

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        y: Tensor = self.conv(F.pad(x_BCTHW, self.padding))
        return y


class ResBlock(nn.Module):
    """Residual block: twice norm, SiLU, convolution; 1x1x1 shortcut if the width changes."""

    norms_of_silu: ClassVar = {"activation": ("norm1", "norm2")}

    def __init__(self, in_channels: int, out_channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels, 3, bias=False)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3, bias=False)
        self.activation = nn.SiLU()
        self.conv3: nn.Module | None = None
        if in_channels != out_channels:
            self.conv3 = CausalConv3d(in_channels, out_channels, 1, bias=False)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        shortcut = x_BCTHW if self.conv3 is None else self.conv3(x_BCTHW)
        h = self.conv1(self.activation(self.norm1(x_BCTHW)))
        h = self.conv2(self.activation(self.norm2(h)))
        y: Tensor = h + shortcut
        return y


def _res_blocks(channels: int, out_channels: int, config: TemporalVAEConfig) -> nn.ModuleList:
    inputs = [channels] + [out_channels] * (config.num_res_blocks - 1)
    return nn.ModuleList(ResBlock(c, out_channels, config.num_groups) for c in inputs)


def _level_channels(config: TemporalVAEConfig) -> list[int]:
    return [config.filters * multiplier for multiplier in config.channel_multipliers]


def _run(blocks: nn.Module | Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:  # type: ignore[union-attr]
        x = block(x)
    return x


class TemporalEncoder(nn.Module):
    """(B, in_out_channels, T, H, W) -> (B, 2 latent_embed_dim, T / factor, H, W), T divisible.

    The output is not yet mean and log-variance: `TemporalVAE.quant_conv` produces those.
    """

    norms_of_silu: ClassVar = {"activation": ("norm1",)}

    def __init__(self, config: TemporalVAEConfig) -> None:
        super().__init__()
        levels = _level_channels(config)
        self.conv_in = CausalConv3d(config.in_out_channels, config.filters, 3, bias=False)
        self.block_res_blocks = nn.ModuleList()
        self.conv_blocks = nn.ModuleList()
        channels = config.filters
        for level, out_channels in enumerate(levels):
            self.block_res_blocks.append(_res_blocks(channels, out_channels, config))
            channels = out_channels
            if level < len(levels) - 1:
                halves = config.temporal_downsample[level]
                self.conv_blocks.append(
                    CausalConv3d(channels, channels, 3, time_stride=2) if halves else nn.Identity()
                )
        self.res_blocks = _res_blocks(channels, channels, config)
        self.norm1 = nn.GroupNorm(config.num_groups, channels)
        self.activation = nn.SiLU()
        self.conv2 = CausalConv3d(channels, 2 * config.latent_embed_dim, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x = self.conv_in(x_BCTHW)
        for level, blocks in enumerate(self.block_res_blocks):
            x = _run(blocks, x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        x = _run(self.res_blocks, x)
        y: Tensor = self.conv2(self.activation(self.norm1(x)))
        return y


class TemporalDecoder(nn.Module):
    """(B, latent_embed_dim, T, H, W) -> (B, in_out_channels, T * factor, H, W).

    Time is doubled by computing twice the channels and splitting them over two frames.
    """

    norms_of_silu: ClassVar = {"activation": ("norm1",)}

    def __init__(self, config: TemporalVAEConfig) -> None:
        super().__init__()
        levels = _level_channels(config)
        channels = levels[-1]
        self.conv1 = CausalConv3d(config.latent_embed_dim, channels, 3)
        self.res_blocks = _res_blocks(channels, channels, config)
        blocks: list[nn.Module] = []
        convs: list[nn.Module] = []
        for level in reversed(range(len(levels))):
            blocks.insert(0, _res_blocks(channels, levels[level], config))
            channels = levels[level]
            if level > 0:
                doubles = config.temporal_downsample[level - 1]
                convs.insert(
                    0, CausalConv3d(channels, 2 * channels, 3) if doubles else nn.Identity()
                )
        self.block_res_blocks = nn.ModuleList(blocks)
        self.conv_blocks = nn.ModuleList(convs)
        self.norm1 = nn.GroupNorm(config.num_groups, channels)
        self.activation = nn.SiLU()
        self.conv_out = CausalConv3d(channels, config.in_out_channels, 3)

    def forward(self, z_BCTHW: Tensor) -> Tensor:
        x = _run(self.res_blocks, self.conv1(z_BCTHW))
        for level in reversed(range(len(self.block_res_blocks))):
            x = _run(self.block_res_blocks[level], x)
            if level > 0 and not isinstance(self.conv_blocks[level - 1], nn.Identity):
                x = self.conv_blocks[level - 1](x)
                x = rearrange(x, "b (c two) t h w -> b c (t two) h w", two=2)
        y: Tensor = self.conv_out(self.activation(self.norm1(x)))
        return y


class TemporalVAE(nn.Module):
    """Temporal autoencoder for one piece of spatial latents (sizes: `TemporalVAEConfig`)."""

    def __init__(self, config: TemporalVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TemporalEncoder(config)
        self.quant_conv = CausalConv3d(2 * config.latent_embed_dim, 2 * config.embed_dim, 1)
        self.post_quant_conv = CausalConv3d(config.embed_dim, config.latent_embed_dim, 1)
        self.decoder = TemporalDecoder(config)

    def moments(self, x_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of a piece's posterior, each (B, embed_dim, latent frames, H, W).

        Zero frames are prepended to make T divisible. The log-variance is clamped to -30..20, as
        upstream's Gaussian does.
        """
        front = self.config.front_padding(x_BCTHW.shape[2])
        padded = F.pad(x_BCTHW, (0, 0, 0, 0, front, 0))
        mean, log_variance = self.quant_conv(self.encoder(padded)).chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def encode(self, x_BCTHW: Tensor) -> Tensor:
        """Posterior mean (B, embed_dim, latent frames, H, W)."""
        return self.moments(x_BCTHW)[0]

    def decode(self, z_BCTHW: Tensor, num_frames: int) -> Tensor:
        """(B, embed_dim, T, H, W) -> (B, in_out_channels, num_frames, H, W), padding cut off."""
        x: Tensor = self.decoder(self.post_quant_conv(z_BCTHW))
        return x[:, :, self.config.front_padding(num_frames) :]
