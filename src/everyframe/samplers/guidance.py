"""Classifier-free guidance: predict its branches, and combine them.

Ho and Salimans 2022 (arXiv 2207.12598). The denoiser of a sampler applies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class GuidanceShare:
    """What guidance adds to the prompt's own prediction, to be held over some steps.

    Attributes:
        value: what it added in the last call that computed both branches; None before one.
        is_held: whether the next call computes the prompt's branch alone and adds `value`.
    """

    value: Tensor | None = None
    is_held: bool = False


def guided(
    predict: Callable[[int, int], Tensor],
    num_branches: int,
    batch_size: int,
    scale: float | Tensor,
    *,
    channels: int | None = None,
    prompt_first: bool = False,
    share: GuidanceShare | None = None,
) -> Tensor:
    """Guided prediction (B, C, ...) from one branch or two, `batch_size` of them in one call.

    ``predict(start, stop)`` is the model's output for these branches, ((stop - start) B, C, ...).
    With two, the unconditional branch comes first, or with `prompt_first` the conditional one. See
    `guide`. Of two branches, `share` remembers what guidance added, or holds it.
    """
    if num_branches == 2 and share is not None and share.is_held and share.value is not None:
        prompt = 0 if prompt_first else 1
        own = predict(prompt, prompt + 1)
        return own.to(torch.promote_types(own.dtype, torch.float32)) + share.value.to(own.device)
    if num_branches <= batch_size:
        output = predict(0, num_branches)
    else:
        starts = range(0, num_branches, batch_size)
        output = torch.cat([predict(i, min(i + batch_size, num_branches)) for i in starts])
    if num_branches == 1:
        return output
    first, second = output.chunk(2)
    cond, uncond = (first, second) if prompt_first else (second, first)
    answer = guide(cond, uncond, scale, channels)
    if share is not None:
        share.value = answer - cond
    return answer


def guide(
    cond: Tensor, uncond: Tensor, scale: float | Tensor, channels: int | None = None
) -> Tensor:
    """``uncond + scale (cond - uncond)`` for (B, C, ...), in float32 at least.

    With `channels` only the first `channels` are guided and the others come from `cond`: Open-Sora
    1.0 guides 3 of its 4 noise channels, as in its published samples. None guides all.
    """
    dtype = torch.promote_types(cond.dtype, torch.float32)
    cond, uncond = cond.to(dtype), uncond.to(dtype)
    if channels is None:
        return uncond + scale * (cond - uncond)
    head, unguided = cond[:, :channels], cond[:, channels:]
    base = uncond[:, :channels]
    return torch.cat([base + scale * (head - base), unguided], dim=1)
