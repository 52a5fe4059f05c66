"""Classifier-free guidance: combine conditional and unconditional predictions.

Ho and Salimans 2022 (arXiv 2207.12598). The denoiser of a sampler applies it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def guide(cond: Tensor, uncond: Tensor, scale: float, channels: int | None = None) -> Tensor:
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
