"""Open-Sora's autoencoders between pixels and latents: `ImageVAE` (1.0) and `VideoVAE` (1.2).

Both have one interface: `encode`, `decode`, `decode_pieces`, `decode_piece`. Sizes and pieces are
data in `vae_config`; the temporal stage is in `temporal_vae`; the spatial stage is diffusers'
`AutoencoderKL`. Everything is differentiable: callers disable gradients.

Parameter names are upstream's: ``spatial_vae.module.*`` (diffusers' names), ``temporal_vae.*``,
``shift``, ``scale``. `ImageVAE` has ``module.*``: a diffusers checkpoint of 1.0's autoencoder
loads into ``.module`` unchanged.

Shapes: B batch, C channels, T frames, H and W rows and columns. Pixels are -1..1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from einops import rearrange
from torch import Tensor, nn

from everyframe.core.errors import CheckpointError, InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.families.opensora.temporal_vae import TemporalVAE
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.runtime.request_checks import FrameChunk
from everyframe.runtime.stages import tiling


class VideoCoder(nn.Module):
    """What both autoencoders share: a video is decoded in the pieces of its config."""

    config: ImageVAEConfig | VideoVAEConfig

    def decode(self, latents_BCTHW: Tensor, num_frames: int | None = None) -> Tensor:
        """Decode latents (B, C, latent frames, h, w) to pixels (B, 3, num_frames, H, W)."""
        frames = latents_BCTHW.shape[2] if num_frames is None else num_frames
        return torch.cat(list(self.decode_pieces(latents_BCTHW, frames)), dim=2)

    def decode_pieces(self, latents_BCTHW: Tensor, num_frames: int) -> Iterator[Tensor]:
        """Yield the pixels of each piece; concatenated in time they equal `decode`.

        Raises `InputError` immediately if `num_frames` does not match the number of latent frames.
        """
        expected, given = self.config.latent_frames(num_frames), latents_BCTHW.shape[2]
        if expected != given:
            raise InputError(
                f"a video of {num_frames} frames has {expected} latent frames, but {given} were "
                "given"
            )
        return (self.decode_piece(latents_BCTHW, piece) for piece in self.config.pieces(num_frames))

    def decode_piece(
        self, latents_BCTHW: Tensor, piece: FrameChunk, at_once: int | None = None
    ) -> Tensor:
        """Decode one piece, given the latents of the whole video; `at_once` frames per call."""
        raise NotImplementedError


class ImageVAE(VideoCoder):
    """diffusers' `AutoencoderKL`, frame by frame: 1.0's autoencoder, and 1.2's spatial stage."""

    config: ImageVAEConfig

    def __init__(self, config: ImageVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.module = _autoencoder(config.autoencoder)

    def encode(self, video_BCTHW: Tensor, at_once: int | None = None) -> Tensor:
        """Encode pixels (B, 3, T, H, W) to scaled latents (B, C, T, H // factor, W // factor).

        `at_once` is the number of frames per call; the default is the config's.
        """
        batch = video_BCTHW.shape[0]
        rows = rearrange(video_BCTHW, "b c t h w -> (b t) c h w")
        latents = [
            self.module.encode(group).latent_dist.mode()
            for group in torch.split(rows, at_once or self.config.micro_batch_size)
        ]
        z = torch.cat(latents) * self.config.scaling_factor
        return rearrange(z, "(b t) c h w -> b c t h w", b=batch)

    def encode_still(self, picture_BCTHW: Tensor, num_frames: int) -> Tensor:
        """Encode one image (B, 3, 1, H, W) as a still video of `num_frames`."""
        return self.encode(picture_BCTHW).expand(-1, -1, num_frames, -1, -1)

    def decode_piece(
        self, latents_BCTHW: Tensor, piece: FrameChunk, at_once: int | None = None
    ) -> Tensor:
        latents = latents_BCTHW[:, :, piece.latent_start : piece.latent_stop]
        return self.decode_frames(latents, at_once)

    def decode_frames(self, latents_BCTHW: Tensor, at_once: int | None = None) -> Tensor:
        """Decode all frames of these latents, `at_once` per call; the default is the config's."""
        batch = latents_BCTHW.shape[0]
        rows = rearrange(latents_BCTHW, "b c t h w -> (b t) c h w") / self.config.scaling_factor
        frames = [
            self.module.decode(group).sample
            for group in torch.split(rows, at_once or self.config.micro_batch_size)
        ]
        return rearrange(torch.cat(frames), "(b t) c h w -> b c t h w", b=batch)


class VideoVAE(VideoCoder):
    """Open-Sora 1.2's autoencoder: `ImageVAE`, then `TemporalVAE` piece by piece, normalised.

    Pieces (17 frames, 5 latent frames) are independent, as in upstream's training.
    """

    config: VideoVAEConfig
    shift: Tensor
    scale: Tensor

    def __init__(self, config: VideoVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.spatial_vae = ImageVAE(config.spatial)
        self.temporal_vae = TemporalVAE(config.temporal)
        self.register_buffer("shift", _per_channel(config.shift))
        self.register_buffer("scale", _per_channel(config.scale))

    def encode(self, video_BCTHW: Tensor, at_once: int | None = None) -> Tensor:
        """Encode pixels (B, 3, T, H, W) to normalised latents (B, C, latent frames, h, w).

        `at_once` is the number of frames per call of the spatial stage.
        """
        return self._through_time(self.spatial_vae.encode(video_BCTHW, at_once))

    def encode_still(self, picture_BCTHW: Tensor, num_frames: int) -> Tensor:
        """Encode one image (B, 3, 1, H, W) as a still video; the spatial stage runs on it once."""
        return self._through_time(self.spatial_vae.encode_still(picture_BCTHW, num_frames))

    def _through_time(self, spatial_BCTHW: Tensor) -> Tensor:
        """Run the temporal stage: spatial latents, one per frame, to normalised latents."""
        latents = [
            self.temporal_vae.encode(spatial_BCTHW[:, :, piece.frame_start : piece.frame_stop])
            for piece in self.config.pieces(spatial_BCTHW.shape[2])
        ]
        return (torch.cat(latents, dim=2) - self.shift) / self.scale

    def decode_piece(
        self, latents_BCTHW: Tensor, piece: FrameChunk, at_once: int | None = None
    ) -> Tensor:
        latents = latents_BCTHW[:, :, piece.latent_start : piece.latent_stop]
        spatial = self.temporal_vae.decode(latents * self.scale + self.shift, piece.num_frames)
        return self.spatial_vae.decode_frames(spatial, at_once)


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1)


def _autoencoder(sizes: Mapping[str, Any]) -> Any:
    known = set(inspect.signature(AutoencoderKL.__init__).parameters) - {"self"}
    for name in sizes:
        if name not in known:
            raise CheckpointError(
                f"diffusers' AutoencoderKL has no size named {name!r}{did_you_mean(name, known)}"
            )
    return AutoencoderKL(**sizes)


def encode_video(
    vae: ImageVAE | VideoVAE,
    video_BCTHW: Tensor,
    settings: Settings,
    *,
    still: int | None = None,
) -> Tensor:
    """Encode a video in -1..1 to latents (B, C, T, h, w), float32 on the CPU.

    `still` encodes one frame as a still video of that many frames.
    """
    at_once = settings.saving(tiling.FRAMES, 0) or None

    def encode(part: Tensor) -> Tensor:
        if still is not None:
            return vae.encode_still(part, still)
        return vae.encode(part, at_once)

    factor, tiles = vae.config.spatial_factor, tiling.tiles_of(settings, tiling.ENCODE)
    latents = tiling.encode_in_tiles(encode, video_BCTHW, factor, *tiles)
    return latents.to("cpu", torch.float32)


def decode_frames(
    vae: ImageVAE | VideoVAE,
    latents_BCTHW: Tensor,
    piece: FrameChunk,
    settings: Settings,
) -> Tensor:
    """Decode one piece of a video's latents to pixels (B, 3, T, H, W) around -1..1."""
    at_once = settings.saving(tiling.FRAMES, 0) or None

    def decode(part: Tensor) -> Tensor:
        return vae.decode_piece(part, piece, at_once)

    return tiling.decode_in_tiles(decode, latents_BCTHW, *tiling.tiles_of(settings, tiling.DECODE))
