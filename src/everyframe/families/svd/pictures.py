"""The given picture as the two encoders want it: a small square for CLIP, whole for the VAE.

Upstream shrank CLIP's picture by a Gaussian blur and bicubic interpolation between the corners'
centres; the weights saw that, so it is done so here, in float32. Sources: skimage's `rescale`
(the blur's width), Stability-AI/generative-models and diffusers' pipeline (that it is used).
Not here: the encoders (`stages.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from everyframe.families.coding import as_floats
from everyframe.families.svd.config import SVDConfig
from everyframe.media.pixels import fit_image


def for_clip(picture_THWC: np.ndarray[Any, Any], size: tuple[int, int], fit: str) -> Tensor:
    """uint8 (1, H, W, 3) to (1, 3, H, W) in -1..1, in its own size or, cropped or padded, `size`.

    A picture that is stretched is stretched by CLIP's own square, from all of its pixels, as
    diffusers does.
    """
    shown = picture_THWC if fit == "stretch" else fit_image(picture_THWC, *size, fit)
    return _as_float(shown)


def for_vae(picture_THWC: np.ndarray[Any, Any], size: tuple[int, int], fit: str) -> Tensor:
    """uint8 (1, H, W, 3) to (1, 3, height, width) in -1..1."""
    return _as_float(fit_image(picture_THWC, *size, fit))


def clip_input(picture_BCHW: Tensor, config: SVDConfig) -> Tensor:
    """A picture in -1..1 as the image encoder reads it: square, normalised by CLIP's colours."""
    square = shrink(picture_BCHW, config.image_side)
    mean, std = (
        torch.tensor(values, dtype=square.dtype)[:, None, None]
        for values in (config.image_mean, config.image_std)
    )
    # Channels first in memory too: convolutions sum in another order otherwise.
    return (((square + 1) / 2 - mean) / std).contiguous()


def shrink(x_BCHW: Tensor, side: int) -> Tensor:
    """(B, C, H, W) to (B, C, side, side), blurred by how much smaller it becomes."""
    for dim in (-1, -2):
        x_BCHW = _blur(x_BCHW, x_BCHW.shape[dim] / side, dim)
    return F.interpolate(x_BCHW, size=(side, side), mode="bicubic", align_corners=True)


def _blur(x_BCHW: Tensor, factor: float, dim: int) -> Tensor:
    """A Gaussian along one side, cut off at two standard deviations, mirrored at the edges."""
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
