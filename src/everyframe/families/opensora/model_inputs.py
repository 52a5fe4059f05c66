"""Validate the denoiser's inputs and expand scalars to (B,)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.ops.attention import unmask_empty_rows
from everyframe.ops.dtypes import float32_or_wider
from everyframe.ops.text_context import TextContext


def check_latents(x: Tensor, in_channels: int, context: TextContext) -> tuple[int, int, int]:
    """Check latents (B, in_channels, T, H, W) against `context`; return (T, H, W)."""
    if x.ndim != 5 or x.shape[1] != in_channels:
        raise InputError(
            f"latents must be (batch, {in_channels}, frames, rows, columns), got {tuple(x.shape)}"
        )
    if len(x) != context.batch_size:
        raise InputError(f"there are {len(x)} latents, but texts for {context.batch_size} of them")
    frames, rows, columns = x.shape[2:]
    return frames, rows, columns


def per_sample(value: Tensor | float, name: str, x: Tensor) -> Tensor:
    """Expand `value` to (B,) for latents `x`, in their dtype but at least float32."""
    dtype = float32_or_wider(x.dtype)
    numbers_B = torch.as_tensor(value).to(dtype).to(x.device)
    if numbers_B.ndim > 1 or numbers_B.numel() not in (1, len(x)):
        raise InputError(f"{name} must be one number or ({len(x)},), got {tuple(numbers_B.shape)}")
    return numbers_B.expand(len(x))


def numbers(value: Tensor | float, name: str, x: Tensor) -> list[float]:
    """Return `value` as B numbers above zero."""
    given = value.tolist() if isinstance(value, Tensor) else value
    listed = [float(one) for one in given] if isinstance(given, list) else [float(given)] * len(x)
    if len(listed) != len(x) or not all(0 < one < float("inf") for one in listed):
        raise InputError(f"{name} must be one number above 0, or {len(x)} of them, got {given}")
    return listed


def frames_mask(x_mask: Tensor | None, num_frames: int, x: Tensor) -> Tensor | None:
    """Return `x_mask` as (B, T) booleans beside `x`, or None without conditioning frames."""
    if x_mask is None:
        return None
    if x_mask.shape != (len(x), num_frames):
        raise InputError(f"x_mask must be {(len(x), num_frames)}, got {tuple(x_mask.shape)}")
    # Read on the mask's device, as the latents may be on meta.
    return None if bool(x_mask.all()) else x_mask.bool().to(x.device)


class Tokens(NamedTuple):
    """Text states cut to the longest text of the batch.

    Attributes:
        text: text states.
        mask: which tokens attention may read; None if every row is full.
        empty: (B,), which rows have no token; None if every row is full.
    """

    text: Tensor
    mask: Tensor | None
    empty: Tensor | None


def cut_to_longest(text: Tensor, mask: Tensor | None, caption_channels: int) -> Tokens:
    """Drop the columns of `text` that no row uses: (B, L, channels) or (B, 1, L, channels).

    `mask` is (B, L), true or 1 for a token; None means tokens everywhere. Raises `InputError` for
    shapes that do not match.
    """
    if text.ndim == 4 and text.shape[1] == 1:  # upstream's layout
        text = text.squeeze(1)
    if text.ndim != 3 or text.shape[-1] != caption_channels:
        raise InputError(
            f"text must be (batch, tokens, {caption_channels}), got {tuple(text.shape)}"
        )
    if mask is None:
        return Tokens(text, None, None)
    if mask.shape != text.shape[:2]:
        raise InputError(
            f"the text's mask must be {tuple(text.shape[:2])} as the text is, "
            f"got {tuple(mask.shape)}"
        )
    mask = mask.bool()
    used = mask.any(dim=0).nonzero()
    # A batch of empty texts keeps one column, as attention needs a key.
    length = int(used[-1]) + 1 if len(used) else 1
    text, mask = text[:, :length], mask[:, :length]
    if bool(mask.all()):
        return Tokens(text, None, None)
    mask = mask.to(text.device)
    return Tokens(text, unmask_empty_rows(mask), ~mask.any(dim=1))
