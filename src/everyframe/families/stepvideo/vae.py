"""Step-Video's autoencoder between pixels and latents: 16 x 16 pixels and 17 frames to 3 latents.

A video is coded piece by piece (`vae_config`). Where two decoded pieces meet, the two frames
beside the seam are blended. Latents are neither scaled nor shifted. Parameter names are
upstream's. The layers are in `vae_layers`.

Shapes: B batch, C channels, T frames, H and W rows and columns. Pixels are around -1..1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.families.stepvideo.vae_layers import (
    CausalConv3d,
    FrameNorm,
    Memory,
    MidBlock,
    NamedWrapper,
    ResBlock,
    SpatialDownsample,
    SpatialUpsample,
    SpatiotemporalDownsample,
    SpatiotemporalUpsample,
    channels_to_space,
    mean_of_channels,
    repeated_channels,
    space_to_channels,
)
from everyframe.runtime.request_checks import FrameChunk
from everyframe.runtime.stages import tiling

#: Weight of a frame beside a seam in its own blend.
_OWN = 0.6


class Level(nn.Module):
    """Residual blocks, followed by an optional down- or upsampling layer (`name`)."""

    def __init__(self, blocks: Iterable[nn.Module], name: str, resample: nn.Module | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(blocks)
        self.name = name
        if resample is not None:
            self.add_module(name, resample)

    def forward(self, x_BCTHW: Tensor, memory: Memory | None = None) -> Tensor:
        for block in self.block:
            x_BCTHW = block(x_BCTHW, memory)
        resample = self._modules.get(self.name)
        return x_BCTHW if resample is None else resample(x_BCTHW, memory)


def _res_blocks(channels: int, width: int, count: int, groups: int) -> list[nn.Module]:
    inputs = [channels] + [width] * (count - 1)
    return [ResBlock(each, width, groups) for each in inputs]


class Encoder(nn.Module):
    """One piece's pixels (B, 3, T, H, W) to mean and log-variance in one (B, 2 z, latents, h, w).

    Layers that reduce channels have a shortcut without parameters, which averages channels.
    """

    def __init__(self, config: StepVAEConfig) -> None:
        super().__init__()
        self.config = config
        groups, wide = config.num_groups, config.wide_channels
        self.conv_in = CausalConv3d(3, config.encoder_channels)
        self.down = nn.ModuleList()
        channels, last = config.encoder_channels, len(config.encoder_widths) - 1
        for level, width in enumerate(config.encoder_widths):
            blocks = _res_blocks(channels, width, config.encoder_blocks, groups)
            halve: nn.Module | None = None
            if level in config.down_sampling_layer:
                halve = SpatiotemporalDownsample(width)
            elif level < last:
                halve = SpatialDownsample(width)
            self.down.append(Level(blocks, "downsample", halve))
            channels = width
        self.mid = MidBlock(channels, groups)
        self.norm_out = FrameNorm(channels, groups)
        self.activation = nn.SiLU()
        self.conv_patchify = NamedWrapper(channels, wide // 8)
        self.conv_out = CausalConv3d(wide, 2 * config.z_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x = self.conv_in(x_BCTHW)
        for level in self.down:
            x = level(x)
        x = self.activation(self.norm_out(self.mid(x)))
        wide = self.config.wide_channels
        x = space_to_channels(self.conv_patchify(x)) + mean_of_channels(space_to_channels(x), wide)
        y: Tensor = self.conv_out(x) + mean_of_channels(x, 2 * self.config.z_channels)
        return y


class Decoder(nn.Module):
    """One piece's latents (B, z, 1..3, h, w) to pixels (B, 3, T, H, W)."""

    def __init__(self, config: StepVAEConfig) -> None:
        super().__init__()
        self.config = config
        groups, wide = config.num_groups, config.wide_channels
        channels = config.decoder_widths[-1]
        self.conv_in = CausalConv3d(config.z_channels, wide)
        self.conv_unpatchify = NamedWrapper(wide, 8 * channels)
        self.mid = MidBlock(channels, groups)
        levels: list[nn.Module] = []
        for level in reversed(range(len(config.decoder_widths))):
            width = config.decoder_widths[level]
            blocks = _res_blocks(channels, width, config.decoder_blocks + 1, groups)
            double: nn.Module | None = None
            if level in config.temporal_up_layers:
                double = SpatiotemporalUpsample(width, groups)
            elif level > 0:
                double = SpatialUpsample(width)
            levels.insert(0, Level(blocks, "upsample", double))
            channels = width
        self.up = nn.ModuleList(levels)
        self.norm_out = FrameNorm(channels, groups)
        self.activation = nn.SiLU()
        self.conv_out = CausalConv3d(channels, 3)

    def forward(self, z_BCTHW: Tensor) -> Tensor:
        x = self.conv_in(z_BCTHW) + repeated_channels(z_BCTHW, self.config.wide_channels)
        # The upsampling adds a shortcut that only rearranges channels.
        dealt = channels_to_space(repeated_channels(x, 8 * self.config.decoder_widths[-1]))
        x = self.mid(channels_to_space(self.conv_unpatchify(x)) + dealt)
        pixels = self._up(x, len(self.up) - 1, {})
        return pixels[:, :, self.config.dropped_frames :]

    def _up(self, x_BCTHW: Tensor, level: int, memory: Memory) -> Tensor:
        """Pixels from the input of that level.

        From here on everything is causal, so frames are upsampled one by one: at most one exists in
        full size, and the result equals that of all frames at once.
        """
        made = []
        for x in torch.split(x_BCTHW, 1, dim=2):
            if level < 0:
                made.append(self.conv_out(self.activation(self.norm_out(x)), memory))
            else:
                made.append(self._up(self.up[level](x, memory), level - 1, memory))
        return torch.cat(made, dim=2)


class StepVAE(nn.Module):
    """Video autoencoder; see `StepVAEConfig` for sizes and valid lengths."""

    def __init__(self, config: StepVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def run_encoder(self, video_BCTHW: Tensor) -> Tensor:
        """Encoder output of all pieces, (B, 2 z, latents, h, w): means, then log-variances.

        Raises `InputError` for an unsupported length: pieces have 17 frames, and the rest must have
        1 to 4 or 9 to 12.
        """
        coded = []
        for chunk in torch.split(video_BCTHW, self.config.frame_len, dim=2):
            if self.config.code_frames(chunk.shape[2]) is None:
                raise InputError(
                    f"{video_BCTHW.shape[2]} frames leave {chunk.shape[2]} after pieces of "
                    f"{self.config.frame_len}, which this autoencoder can't encode"
                )
            coded.append(self.encoder(chunk))
        return torch.cat(coded, dim=2)

    def moments(self, video_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (clamped to -30..20) of the latents, (B, z, latents, h, w) each."""
        mean, log_variance = self.run_encoder(video_BCTHW).chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def encode(self, video_BCTHW: Tensor, noise_BCTHW: Tensor | None = None) -> Tensor:
        """Mean of the latents or, with unit `noise` of its shape, a sample."""
        mean, log_variance = self.moments(video_BCTHW)
        if noise_BCTHW is None:
            return mean
        return mean + torch.exp(0.5 * log_variance) * noise_BCTHW

    def decode(self, latents_BCTHW: Tensor, num_frames: int | None = None) -> Tensor:
        """Decode latents (B, z, latent frames, h, w) to pixels (B, 3, num_frames, H, W)."""
        decoded = list(self.decode_pieces(latents_BCTHW, num_frames))
        seams = SeamBlender(dim=2)
        return torch.cat(
            [
                seams.add(piece, is_last=number == len(decoded))
                for number, piece in enumerate(decoded, start=1)
            ],
            dim=2,
        )

    def decode_pieces(
        self, latents_BCTHW: Tensor, num_frames: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the pixels of each piece, seams not blended; see `SeamBlender`."""
        made = self.config.decoded_frames(latents_BCTHW.shape[2])
        if num_frames is not None and made != num_frames:
            raise InputError(
                f"{latents_BCTHW.shape[2]} latent frames are {made} frames, not {num_frames}"
            )
        return (self.decode_piece(latents_BCTHW, piece) for piece in self.config.pieces(made))

    def decode_piece(self, latents_BCTHW: Tensor, piece: FrameChunk) -> Tensor:
        pixels: Tensor = self.decoder(latents_BCTHW[:, :, piece.latent_start : piece.latent_stop])
        return pixels


class SeamBlender:
    """Blends the two frames beside each seam as pieces arrive.

    The later frame gets 0.4 of the earlier one, then the earlier one gets 0.4 of the blended later
    one: upstream's order. One frame is held until the next piece arrives. `dim` is the frame
    dimension.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._held: Tensor | None = None

    def add(self, piece: Tensor, *, is_last: bool) -> Tensor:
        """Frames that are finished once this piece has arrived."""
        dim, last = self._dim, piece.shape[self._dim] - 1
        ready = []
        if self._held is not None:
            first = _OWN * piece.narrow(dim, 0, 1) + (1 - _OWN) * self._held
            ready.append(_OWN * self._held + (1 - _OWN) * first)
            piece = torch.cat((first, piece.narrow(dim, 1, last)), dim=dim)
        self._held = None if is_last else piece.narrow(dim, last, 1)
        return torch.cat((*ready, piece if is_last else piece.narrow(dim, 0, last)), dim=dim)


def decode_frames(
    vae: StepVAE,
    latents_BCTHW: Tensor,
    piece: FrameChunk,
    settings: Settings,
) -> Tensor:
    """Decode one piece to pixels (T, C, H, W) around -1..1, given the video's latents."""
    tiles = tiling.tiles_of(settings, tiling.DECODE)
    decode = partial(vae.decode_piece, piece=piece)
    pixels = tiling.decode_in_tiles(decode, latents_BCTHW, *tiles)
    return rearrange(pixels, "1 c t h w -> t c h w")
