"""Previews: small pictures of the clean latents that a step predicts.

A linear map turns one latent frame into colours, or a tiny autoencoder decodes it. Only that frame
is read, so a run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from everyframe.core.events import Preview
from everyframe.core.plan import PreviewPlan
from everyframe.media.preview_picture import LONG_SIDE, encode_preview
from everyframe.runtime.previews.latent_space import LatentColors, LatentSpace
from everyframe.runtime.previews.tiny_autoencoder import TinyDecoder


class Previewer:
    """Makes the previews of a run.

    Raises:
        CheckpointError: the plan's tiny autoencoder can't be read.
    """

    def __init__(self, plan: PreviewPlan, space: LatentSpace) -> None:
        self._interval, self._layout = plan.interval, space.layout
        self._decoder: LinearDecoder | TinyDecoder | None = None
        colors = None if plan.decoder is not None else space.colors(reads=True)
        if plan.decoder is not None:
            self._decoder = TinyDecoder(plan.decoder)
        elif colors is not None:
            self._decoder = LinearDecoder(colors)
        # Pillow imports its formats when the first file is written, which a step would wait for.
        Image.preinit()

    def preview(
        self, seed: int, step: int, num_steps: int, clean: Callable[[], Tensor | None] | None
    ) -> Preview | None:
        """The preview after `step` steps of a video; None between two, and without a map.

        ``clean()`` gives the latents in the space's layout, or None if they are not known.
        """
        is_due = step % self._interval == 0 or step == num_steps
        if not is_due or clean is None or self._decoder is None:
            return None
        latents = clean()
        if latents is None:
            return None
        pixels = self._decoder(middle_frames(latents, self._layout, self._decoder.window))
        # A preview precedes the guard's check.
        shown = (pixels.nan_to_num(0.0) / 2 + 0.5).clamp(0, 1) * 255
        frame = scale_frame(shown.round().to("cpu", torch.uint8))
        height, width = frame.shape[:2]
        return Preview(seed, step, num_steps, width, height, encode_preview(frame.numpy()))


class LinearDecoder:
    """Colours (h, w, 3) in -1..1 of the last of some latent frames (C, t, h, w)."""

    window = 1

    def __init__(self, colors: LatentColors) -> None:
        self._factors = torch.tensor(colors.factors, dtype=torch.float32, device="cpu")
        self._bias = torch.tensor(colors.bias, dtype=torch.float32, device="cpu")

    def __call__(self, frames_CTHW: Tensor) -> Tensor:
        frame = frames_CTHW[:, -1].to("cpu", torch.float32)
        return torch.einsum("chw,cr->hwr", frame, self._factors) + self._bias


def scale_frame(frame: Tensor) -> Tensor:
    """A frame (H, W, 3) of uint8, bicubically scaled so that its longer side is `LONG_SIDE`.

    On a CPU this takes an eighth of the time of Pillow, which is most of a preview's.
    """
    scale = LONG_SIDE / max(frame.shape[:2])
    size = [max(1, round(side * scale)) for side in frame.shape[:2]]
    scaled = interpolate(frame[None].movedim(-1, 1), size, mode="bicubic", antialias=True)
    return scaled[0].movedim(0, -1)


def middle_frames(latents: Tensor, layout: str, count: int = 1) -> Tensor:
    """The frame in the middle with those before it, `count` in all if there are: (C, t, h, w).

    `latents` are in that layout; the first sample is taken.
    """
    batch = "b" if "b" in layout else "1"
    batched = rearrange(latents, f"{layout} -> {batch} c t h w")
    middle = batched.shape[2] // 2
    return batched[0, :, max(0, middle + 1 - count) : middle + 1]
