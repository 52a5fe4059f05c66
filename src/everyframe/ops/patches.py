"""Patches of latents as tokens: the grid of a denoiser's inputs, and latents of its outputs."""

from __future__ import annotations

from typing import Protocol

from einops import rearrange
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.ops.dtypes import upcast_to_float32

#: Frames, rows and columns of patches.
PatchGrid = tuple[int, int, int]


class TextBatch(Protocol):
    """Texts of a batch."""

    @property
    def batch_size(self) -> int:
        """Number of texts."""


def patch_grid(x: Tensor, t: Tensor, texts: TextBatch, channels: int, patch: int) -> PatchGrid:
    """Grid of latents `x` (B, C, T, H, W), with timesteps `t` (B,) and B texts.

    Raises:
        InputError: another shape, or another number of timesteps or texts.
    """
    if x.ndim != 5 or x.shape[1] != channels or x.shape[3] % patch or x.shape[4] % patch:
        sides = f"rows and columns multiples of {patch}" if patch > 1 else "rows, columns"
        raise InputError(
            f"latents must be (batch, {channels}, frames, {sides}), got {tuple(x.shape)}"
        )
    if tuple(t.shape) != (len(x),) or texts.batch_size != len(x):
        raise InputError(
            f"{len(x)} latents need as many timesteps and texts, got timesteps of shape "
            f"{tuple(t.shape)} and texts of {texts.batch_size}"
        )
    return x.shape[2], x.shape[3] // patch, x.shape[4] // patch


def unpatchify(tokens: Tensor, grid: PatchGrid, patch: int, features: str) -> Tensor:
    """Latents (B, C, T, H, W) of tokens (B, T * H' * W', features), in float32 or wider.

    `features` is their order in a token, such as ``"c ph pw"``.
    """
    pattern = f"b (t h w) ({features}) -> b c t (h ph) (w pw)"
    sizes = {"t": grid[0], "h": grid[1], "w": grid[2], "ph": patch, "pw": patch}
    return upcast_to_float32(rearrange(tokens, pattern, **sizes))
