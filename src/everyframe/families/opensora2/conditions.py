"""Given frames as the denoiser's condition, and their place in the resulting latents.

Upstream's condition types are pictures at the beginning, the end or both (`i2v_head`, `i2v_tail`,
`i2v_loop`), and clips of 33 or 65 frames at the beginning or the end (`v2v_head`, `v2v_tail`,
`..._easy`). Its published training did not use clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everyframe.parallel.communicator import broadcastable


@broadcastable
@dataclass(frozen=True)
class GivenLatents:
    """Given latents (1, C, n, h, w) at the beginning and at the end of a video."""

    first: Tensor | None = None
    last: Tensor | None = None

    def condition(self, shape: Sequence[int]) -> Tensor:
        """Mask, then masked latents, (1, 1 + C, T, h, w), for latents of shape (C, T, h, w)."""
        made = torch.zeros((1, 1 + shape[0], *shape[1:]), dtype=torch.float32)
        for here, latents in self._places(shape[1]):
            made[:, :1, here] = 1
            made[:, 1:, here] = latents
        return made

    def paste(self, latents: Tensor) -> Tensor:
        """`latents` (1, C, T, h, w) with the given frames in place of the generated ones."""
        made = latents.clone()
        for here, given in self._places(latents.shape[2]):
            made[:, :, here] = given.to(made)
        return made

    def _places(self, num_frames: int) -> list[tuple[slice, Tensor]]:
        places = []
        if self.first is not None:
            places.append((slice(0, self.first.shape[2]), self.first))
        if self.last is not None:
            places.append((slice(num_frames - self.last.shape[2], num_frames), self.last))
        return places
