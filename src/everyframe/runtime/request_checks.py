"""What several families ask of a request alike: its size, its length, how pictures fit. No torch.

Each function refuses what can't be had by an `InputError` that says what can. Not here: which
sizes and lengths a model has, which is its family's. Read next: a family's `settle.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.core.request import MAX_FRAMES, Request

#: Of one video whose latents are in memory all at once: the longest clip, of a megapixel a frame.
MAX_PIXELS = 100 * 10**9

#: How a picture of other proportions is fitted, and what it then is.
_FITTED = {"crop": "cropped", "pad": "padded", "stretch": "stretched"}


def check_used(title: str, request: Request, without: Mapping[str, str]) -> None:
    """Refuse options that have no effect on a model that makes one clip; `without`: what instead.

    Raises:
        InputError: names the option, and what to give in its place.
    """
    for name, instead in without.items():
        if getattr(request, name) is not None:
            raise InputError(f"{name} has no effect on {title}: {instead}")
    if request.chain > 1:
        raise InputError(f"{title} can't go on from a clip (chain)")


def check_prompt(prompt: str) -> None:
    """Refuse a prompt without a word, for a model that draws what a prompt says."""
    if not prompt.strip():
        raise InputError(
            "the prompt is empty; say what the video shows, "
            'for example "a red circle moves to the right on a blue background"'
        )


def check_size(height: int, width: int, step: int) -> None:
    """Refuse sides that are no multiples of `step` pixels; names the nearest that are."""
    for name, given in (("height", height), ("width", width)):
        if given % step:
            low = max(given // step * step, step)
            near = str(low) if low > given else f"{low} or {low + step}"
            raise InputError(f"{name} must be a multiple of {step}, got {given}; try {near}")


def check_amount(num_frames: int, height: int, width: int) -> None:
    """Refuse a video that is beyond any device, before a plan is sought for it."""
    if num_frames * height * width > MAX_PIXELS:
        given = num_frames * height * width / 1e9
        raise InputError(
            f"{num_frames} frames of {width}x{height} are {given:.0f} billion pixels; at most "
            f"{MAX_PIXELS // 10**9} billion can be asked for: fewer frames, or a smaller size"
        )


def frames_in(seconds: float, fps: float) -> int:
    """The frames of so many seconds, at least one. Raises `InputError` for too many."""
    wanted = seconds * fps
    if wanted > MAX_FRAMES:
        raise InputError(
            f"{seconds:g} s at {fps:g} fps are {wanted:g} frames; "
            f"at most {MAX_FRAMES} can be asked for"
        )
    return max(1, round(wanted))


def in_pieces(seconds: float, fps: float, frames: int, piece: int) -> str:
    """What is said of seconds that become other frames, in whole pieces of so many."""
    return (
        f"{seconds:g} s become {frames} frames ({frames / fps:.2f} s): "
        f"the autoencoder works in pieces of {piece} frames"
    )


#: What our own models do where nobody says how.
DEFAULT_FIT = "crop"


def check_fit(fit: str | None) -> None:
    """Refuse a way to fit pictures that there is none of."""
    if fit is not None and fit not in _FITTED:
        hint = did_you_mean(fit, _FITTED)
        raise InputError(f"fit must be one of {', '.join(_FITTED)}, got {fit!r}{hint}")


def told_of_fit(what: str, given: tuple[int, int], size: tuple[int, int], fit: str) -> str | None:
    """What is said of a picture whose (height, width) has other proportions; None if it has not."""
    (height, width), (to_height, to_width) = given, size
    if height * to_width == width * to_height:
        return None
    others = " or ".join(way for way in _FITTED if way != fit)
    return (
        f"the {what} is {width}x{height} and is {_FITTED[fit]} to the proportions of "
        f"{to_width}x{to_height} (fit: {others} would be another way)"
    )


def shorter_lengths(num_frames: int, piece: int) -> list[int]:
    """Lengths down to one piece, each about half of the one before, in whole pieces."""
    lengths = [num_frames]
    while lengths[-1] > piece:
        lengths.append(max(lengths[-1] // 2 // piece, 1) * piece)
    return lengths


def smaller_sizes(height: int, width: int, step: int, least: int) -> list[tuple[int, int]]:
    """Sizes in steps of pixels, each three quarters of the one before, no side below `least`."""
    sides = [(height, width)]
    while min(sides[-1]) * 3 // 4 >= least:
        height, width = (side * 3 // 4 // step * step for side in sides[-1])
        sides.append((height, width))
    return sides


def smaller_videos(
    settings: Settings, lengths: Sequence[int], sides: Sequence[tuple[int, int]]
) -> Iterator[Settings]:
    """The same video shorter, smaller or both, the one with most pixels first."""
    choices = [(height, width, frames) for height, width in sides for frames in lengths]
    for height, width, frames in sorted(choices[1:], key=math.prod, reverse=True):
        yield replace(settings, height=height, width=width, num_frames=frames)


class LatentSize(NamedTuple):
    """Number of latent frames, rows and columns."""

    num_frames: int
    height: int
    width: int


@dataclass(frozen=True)
class FrameChunk:
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
