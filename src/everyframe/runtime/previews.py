"""Previews: small pictures of the clean latents that a step predicts.

A linear map turns one latent frame into colours, or a tiny autoencoder decodes it. Only that frame
is read, so a run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everyframe.core.events import Preview
from everyframe.core.plan import PreviewPlan
from everyframe.media.preview_picture import encode_preview
from everyframe.runtime.latent_space import LatentColors, LatentSpace


class Previewer:
    """Makes the previews of a run; `to_pixels` maps a latent frame (C, h, w) to (H, W, 3)."""

    def __init__(self, plan: PreviewPlan, space: LatentSpace) -> None:
        self._interval, self._layout = plan.interval, space.layout
        self._to_pixels: Callable[[Tensor], Tensor] | None = None
        colors = space.colors(reads=True)
        if colors is not None:
            self._to_pixels = LinearDecoder(colors)

    def preview(
        self, seed: int, step: int, num_steps: int, clean: Callable[[], Tensor | None] | None
    ) -> Preview | None:
        """The preview after `step` steps of a video; None between two, and without a map.

        ``clean()`` gives the latents in the space's layout, or None if they are not known.
        """
        is_due = step % self._interval == 0 or step == num_steps
        if not is_due or clean is None or self._to_pixels is None:
            return None
        latents = clean()
        if latents is None:
            return None
        pixels = self._to_pixels(middle_frame(latents, self._layout).to(torch.float32))
        # A preview shows what the guard has not looked at yet.
        shown = (pixels.nan_to_num(0.0) / 2 + 0.5).clamp(0, 1) * 255
        frame = shown.round().to("cpu", torch.uint8).numpy()
        image, (width, height) = encode_preview(frame)
        return Preview(seed, step, num_steps, width, height, image)


class LinearDecoder:
    """Colours (h, w, 3) in -1..1 of a latent frame (C, h, w), by a linear map."""

    def __init__(self, colors: LatentColors) -> None:
        self._factors = torch.tensor(colors.factors, dtype=torch.float32, device="cpu")
        self._bias = torch.tensor(colors.bias, dtype=torch.float32, device="cpu")

    def __call__(self, frame_CHW: Tensor) -> Tensor:
        return torch.einsum("chw,cr->hwr", frame_CHW.to("cpu"), self._factors) + self._bias


def middle_frame(latents: Tensor, layout: str) -> Tensor:
    """The frame (C, h, w) in the middle of latents in that layout, of the first sample."""
    axes = layout.split()
    for axis in reversed(range(len(axes))):
        if axes[axis] in ("b", "t"):
            is_time = axes[axis] == "t"
            latents = latents.select(axis, latents.shape[axis] // 2 if is_time else 0)
    return latents
