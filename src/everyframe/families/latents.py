"""What families with latents have in common before anything is computed. No torch.

`Piece` is what a video is coded in at once, `AutoencoderSizes` reads the config of diffusers' image
autoencoders, `check_latents` refuses start noise of another shape. Read next: a family's
`config.py` and `settle.py`, which use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from everyframe.core.errors import InputError


class LatentSize(NamedTuple):
    """Number of latent frames, rows and columns."""

    num_frames: int
    height: int
    width: int


@dataclass(frozen=True)
class Piece:
    """Frames ``frame_start:frame_stop`` of a video and the latent frames that hold them alone."""

    frame_start: int
    frame_stop: int
    latent_start: int
    latent_stop: int

    @property
    def num_frames(self) -> int:
        return self.frame_stop - self.frame_start


class AutoencoderSizes:
    """Sizes by the config of the autoencoder, `vae`; diffusers' defaults where it is silent."""

    vae: Mapping[str, Any]

    @property
    def spatial_factor(self) -> int:
        """Pixels of one latent, along each side."""
        return int(2 ** (len(self.vae.get("block_out_channels", (64,))) - 1))

    @property
    def latent_channels(self) -> int:
        """Channels of the latents that are made."""
        return int(self.vae.get("latent_channels", 4))

    @property
    def scaling_factor(self) -> float:
        """Latents of the denoiser over latents of the autoencoder."""
        return float(self.vae.get("scaling_factor", 0.18215))

    @property
    def force_upcast(self) -> bool:
        """Whether the autoencoder overflows half precision, by its own word."""
        return bool(self.vae.get("force_upcast", True))


def check_latents(latents: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raise `InputError` if start noise was given and has not the shape `expected`.

    `meaning` says in the message what the shape stands for.
    """
    if latents is None:
        return
    given = tuple(getattr(latents, "shape", ()))
    if given != expected:
        raise InputError(
            f"latents must be an array or tensor of shape {expected} {meaning}, got "
            f"{given or type(latents).__name__}"
        )
