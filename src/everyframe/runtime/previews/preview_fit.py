"""Fit the linear map from latents to colours to a clip that an autoencoder decoded.

Least squares over one frame for each latent frame, averaged to the size of the latents. The map is
cached by the digest of the autoencoder, so that its later runs have previews.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from everyframe.core.events import Note
from everyframe.media.pixels import Frames
from everyframe.runtime.previews.latent_space import LatentColors, LatentSpace

#: A map that explains less of the variance gives unrecognisable pictures.
LEAST_EXPLAINED = 0.3
#: Fewest samples for each channel: fewer are explained by any map.
_SAMPLES = 4


class ColorFit:
    """Collects the frames of a video while they are decoded, small, and fits at the end.

    Latents are in the space's layout; `num_frames` is the number of frames that they stand for.
    """

    def __init__(self, space: LatentSpace, latents: Tensor, num_frames: int) -> None:
        self._space = space
        axes = " ".join(axis if axis != "b" else "1" for axis in space.layout.split())
        self._latents = rearrange(latents.to("cpu", torch.float32), f"{axes} -> t h w c")
        count = len(self._latents)
        # The first and last frames stand for the first and last latents, in causal models too.
        places = np.linspace(0, num_frames - 1, count) if count > 1 else [num_frames // 2]
        self._wanted = [round(float(place)) for place in places]
        self._frames: dict[int, Tensor] = {}
        self._seen = 0

    def add(self, frames_THWC: Frames) -> None:
        """Add the next frames, float32 in 0..1."""
        for frame in frames_THWC:
            if self._seen in self._wanted:
                pixels = rearrange(torch.as_tensor(frame), "h w c -> 1 c h w")
                _, height, width, _ = self._latents.shape
                small = F.adaptive_avg_pool2d(pixels.to(torch.float32) * 2 - 1, (height, width))
                self._frames[self._seen] = rearrange(small[0], "c h w -> h w c")
            self._seen += 1

    def samples(self) -> tuple[Tensor, Tensor]:
        """Latents (n, C) and colours (n, 3) of the frames that came."""
        pairs = [
            (latent, self._frames[place])
            for latent, place in zip(self._latents, self._wanted, strict=True)
            if place in self._frames
        ]
        latents, colors = zip(*pairs, strict=True)
        return (
            torch.cat([each.flatten(0, 1) for each in latents]),
            torch.cat([each.flatten(0, 1) for each in colors]),
        )

    def finish(self) -> tuple[Note, ...]:
        """Fit and cache the map; a note about it. Nothing if no frames came."""
        if not self._frames:
            return ()
        latents, pixels = self.samples()
        if len(latents) < _SAMPLES * latents.shape[1]:
            return (Note("no previews of this autoencoder yet: this video is too small for a fit"),)
        colors, explained = fit_colors([(latents, pixels)])
        if explained < LEAST_EXPLAINED:
            return (
                Note(
                    f"no previews of this autoencoder yet: a linear map explains {explained:.0%} "
                    f"of this video's colours, and {LEAST_EXPLAINED:.0%} are needed"
                ),
            )
        try:
            self._space.keep(colors)
        except OSError as error:
            return (Note(f"the colours for previews can't be saved: {error}"),)
        text = f"the next runs have previews: a linear map explains {explained:.0%} of the colours"
        return (Note(text),)


def fit_colors(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[LatentColors, float]:
    """The map of (latents (n, C), colours (n, 3)) pairs, and the share of variance it explains."""
    latents, colors = (torch.cat(side).double() for side in zip(*samples, strict=True))
    with_one = F.pad(latents, (0, 1), value=1.0)
    # The driver that finds the smallest solution where channels depend on each other.
    solution = torch.linalg.lstsq(with_one, colors, driver="gelsd").solution
    left = (colors - with_one @ solution).square().sum()
    whole = (colors - colors.mean(0)).square().sum()
    *rows, bias = [(r, g, b) for r, g, b in solution.tolist()]
    source = f"factors fitted to {len(colors)} decoded pixels"
    return LatentColors(tuple(rows), bias, source), float(1 - left / whole) if whole else 0.0
