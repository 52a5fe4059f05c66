"""Stable Video Diffusion's ``denoise(x, t)``: the UNet with image conditioning and guidance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.unet import VideoUNet
from everyframe.media.pixels import fit_image
from everyframe.runtime.memory.memory_fallbacks import cfg_batch_size
from everyframe.runtime.stages.frame_pieces import as_floats
from everyframe.samplers.guidance import GuidanceShare, guided


@dataclass(frozen=True)
class ImageConditioning:
    """Conditioning image for the denoiser: CLIP embedding (1, 1, D) and latents (1, C, h, w).

    `latents` is None until the autoencoder has run. Both are float32 on the CPU.
    """

    embedding: Tensor
    latents: Tensor | None = None


class Denoiser:
    """``denoise(x, t)`` for the sampler: the UNet with image conditioning and guidance.

    Guidance rises linearly over the frames from `min_guidance_scale` to `max_guidance_scale`. The
    unconditional branch gets zeros for the image embedding and latents; both branches get frame
    rate, motion and noise level. If memory is short, the plan runs the branches one after the
    other.
    """

    #: Set from outside for a method that holds what guidance adds.
    share: GuidanceShare | None = None

    def __init__(
        self, unet: VideoUNet, picture: ImageConditioning, settings: Settings, device: str
    ) -> None:
        assert picture.latents is not None, "the encoding stage comes before"
        self._unet = unet
        # Frame rates were counted from 0 in training.
        conditions = (
            settings.fps - 1,
            settings.option("motion_bucket_id"),
            settings.option("noise_aug_strength"),
        )
        conditions_BN = torch.tensor([conditions], dtype=torch.float32)
        embedding, latents_BCHW = picture.embedding, picture.latents
        self._guidance_TCHW: float | Tensor = 1.0
        self._batch_size = cfg_batch_size(settings, 2)
        if settings.guidance_scale > 1:
            low, high = settings.option("min_guidance_scale"), settings.guidance_scale
            rising = torch.linspace(low, high, settings.num_frames, dtype=torch.float32)
            self._guidance_TCHW = rising[:, None, None, None].to(device)
            embedding = torch.cat([torch.zeros_like(embedding), embedding])
            latents_BCHW = torch.cat([torch.zeros_like(latents_BCHW), latents_BCHW])
            conditions_BN = conditions_BN.expand(2, -1)
        embedding_BD = embedding[:, 0].to(device)
        self._context = unet.context(embedding_BD, conditions_BN.to(device), settings.num_frames)
        still = latents_BCHW[:, None].expand(-1, settings.num_frames, -1, -1, -1)
        self._picture_BTCHW = still.to(device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Guided v for scaled x (1, T, C, h, w) and t (1,)."""

        def predict(start: int, stop: int) -> Tensor:
            picture_BTCHW = self._picture_BTCHW[start:stop].to(x.dtype)
            answer: Tensor = self._unet(
                torch.cat([x.expand(stop - start, *x.shape[1:]), picture_BTCHW], dim=2),
                t.expand(stop - start),
                self._context.rows(slice(start, stop)),
            )
            return answer

        branches = len(self._picture_BTCHW)
        return guided(predict, branches, self._batch_size, self._guidance_TCHW, share=self.share)


def clip_pixels(picture_THWC: np.ndarray[Any, Any], size: tuple[int, int], fit: str) -> Tensor:
    """uint8 (1, H, W, 3) to (1, 3, H, W) in -1..1: in its own size or, cropped or padded, `size`.

    With fit "stretch", all pixels are resized directly to CLIP's square, as diffusers does.
    """
    shown = picture_THWC if fit == "stretch" else fit_image(picture_THWC, *size, fit)
    return _as_float(shown)


def vae_pixels(picture_THWC: np.ndarray[Any, Any], size: tuple[int, int], fit: str) -> Tensor:
    """uint8 (1, H, W, 3) to (1, 3, height, width) in -1..1."""
    return _as_float(fit_image(picture_THWC, *size, fit))


def clip_input(picture_BCHW: Tensor, config: SVDConfig) -> Tensor:
    """Convert an image in -1..1 to the image encoder's input: square, with CLIP's normalisation."""
    square = shrink(picture_BCHW, config.image_side)
    mean, std = (
        torch.tensor(values, dtype=square.dtype)[:, None, None]
        for values in (config.image_mean, config.image_std)
    )
    # Contiguous: another memory layout changes the convolutions' summation order.
    return (((square + 1) / 2 - mean) / std).contiguous()


def shrink(x_BCHW: Tensor, side: int) -> Tensor:
    """Resize (B, C, H, W) to (B, C, side, side), with a blur that matches the scale factor."""
    for dim in (-1, -2):
        x_BCHW = _blur(x_BCHW, x_BCHW.shape[dim] / side, dim)
    return F.interpolate(x_BCHW, size=(side, side), mode="bicubic", align_corners=True)


def _blur(x_BCHW: Tensor, factor: float, dim: int) -> Tensor:
    """Gaussian blur along one dimension, cut at two standard deviations, mirrored edges."""
    deviation = max((factor - 1) / 2, 0.001)
    reach = int(max(4 * deviation, 3)) // 2
    offsets = torch.arange(-reach, reach + 1, dtype=x_BCHW.dtype)
    weights = torch.exp(-(offsets**2) / (2 * deviation**2))
    weights = weights / weights.sum()
    horizontal = dim == -1
    padded = F.pad(x_BCHW, (reach, reach, 0, 0) if horizontal else (0, 0, reach, reach), "reflect")
    kernel = weights[None, :] if horizontal else weights[:, None]
    channels = x_BCHW.shape[1]
    return F.conv2d(padded, kernel.expand(channels, 1, *kernel.shape), groups=channels)


def _as_float(picture_THWC: np.ndarray[Any, Any]) -> Tensor:
    return rearrange(as_floats(picture_THWC), "t h w c -> t c h w") * 2 - 1
