"""Checks of what a denoiser is called with, and one shape for what may come as a number or (B,)."""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.families.text_context import TextContext
from everyframe.ops.dtypes import float32_or_wider


def check_latents(x: Tensor, in_channels: int, context: TextContext) -> tuple[int, int, int]:
    """Frames, rows and columns of latents (B, in_channels, T, H, W) that go with `context`."""
    if x.ndim != 5 or x.shape[1] != in_channels:
        raise InputError(
            f"latents must be (batch, {in_channels}, frames, rows, columns), got {tuple(x.shape)}"
        )
    if len(x) != context.batch_size:
        raise InputError(f"there are {len(x)} latents, but texts for {context.batch_size} of them")
    frames, rows, columns = x.shape[2:]
    return frames, rows, columns


def per_sample(value: Tensor | float, name: str, x: Tensor) -> Tensor:
    """`value` as (B,) beside latents `x`, in their dtype but in float32 at least."""
    dtype = float32_or_wider(x.dtype)
    numbers_B = torch.as_tensor(value).to(dtype).to(x.device)
    if numbers_B.ndim > 1 or numbers_B.numel() not in (1, len(x)):
        raise InputError(f"{name} must be one number or ({len(x)},), got {tuple(numbers_B.shape)}")
    return numbers_B.expand(len(x))


def numbers(value: Tensor | float, name: str, x: Tensor) -> list[float]:
    """`value` as B numbers above zero."""
    given = value.tolist() if isinstance(value, Tensor) else value
    listed = [float(one) for one in given] if isinstance(given, list) else [float(given)] * len(x)
    if len(listed) != len(x) or not all(0 < one < float("inf") for one in listed):
        raise InputError(f"{name} must be one number above 0, or {len(x)} of them, got {given}")
    return listed


def frames_mask(x_mask: Tensor | None, num_frames: int, x: Tensor) -> Tensor | None:
    """`x_mask` as (B, T) booleans beside `x`, or None where no frame is given."""
    if x_mask is None:
        return None
    if x_mask.shape != (len(x), num_frames):
        raise InputError(f"x_mask must be {(len(x), num_frames)}, got {tuple(x_mask.shape)}")
    # Asked where the mask lies, as the latents may be on a device that computes nothing.
    return None if bool(x_mask.all()) else x_mask.bool().to(x.device)
