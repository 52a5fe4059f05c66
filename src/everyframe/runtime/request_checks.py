"""Request checks that families share: size, length, prompt, image fit, start noise. No torch.

Each check raises an `InputError` that says what is possible instead. The sizes and lengths of a
model are in its family's `settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.limits import MAX_FRAMES
from everyframe.core.plan import Settings
from everyframe.core.request import Request

#: Maximum pixels of a video with all latents in memory: the longest clip at a megapixel a frame.
MAX_PIXELS = 100 * 10**9

#: Fits for an image of another aspect ratio, and the participle for messages.
_FITTED = {"crop": "cropped", "pad": "padded", "stretch": "stretched"}


def check_used(title: str, request: Request, without: Mapping[str, str]) -> None:
    """Reject options without effect on a single-clip model; `without` maps each to an alternative.

    Raises:
        InputError: names the option and its alternative.
    """
    for name, instead in without.items():
        if getattr(request, name) is not None:
            raise InputError(f"{name} has no effect on {title}: {instead}")
    if request.chain > 1:
        raise InputError(f"{title} can't continue a clip (chain)")


def read_prompt(title: str, request: Request) -> str:
    """The prompt of a model that draws what it says, stripped. Raises `InputError` without one."""
    if request.prompt is None:
        raise InputError(f"{title} draws what a prompt says; give one")
    check_prompt(request.prompt)
    return request.prompt.strip()


def check_prompt(prompt: str) -> None:
    """Reject an empty prompt."""
    if not prompt.strip():
        raise InputError(
            "the prompt is empty; say what the video shows, "
            'for example "a red circle moves to the right on a blue background"'
        )


def too_long_prompt(num_tokens: int, limit: int, cut: str) -> InputError:
    """Error for a prompt of more tokens than the model reads; names the words to cut."""
    return InputError(
        f"the prompt has {num_tokens} tokens, this model reads {limit}; shorten it, or "
        f"drop its end with --truncate-prompt, which cuts: {quoted(cut)}"
    )


def quoted(words: str) -> str:
    """Words of a prompt for a message, the first 200 letters."""
    return repr(words if len(words) <= 200 else f"{words[:200]}…")


def check_size(height: int, width: int, step: int) -> None:
    """Reject sides that are no multiple of `step` pixels; names the nearest that are."""
    for name, given in (("height", height), ("width", width)):
        if given % step:
            low = max(given // step * step, step)
            near = str(low) if low > given else f"{low} or {low + step}"
            raise InputError(f"{name} must be a multiple of {step}, got {given}; try {near}")


def check_amount(num_frames: int, height: int, width: int) -> None:
    """Reject a video that is too large for any device, before planning starts."""
    if num_frames * height * width > MAX_PIXELS:
        given = num_frames * height * width / 1e9
        raise InputError(
            f"{num_frames} frames of {width}x{height} are {given:.0f} billion pixels; at most "
            f"{MAX_PIXELS // 10**9} billion can be asked for: fewer frames, or a smaller size"
        )


def frames_in(seconds: float, fps: float) -> int:
    """Number of frames in that many seconds, at least 1. Raises `InputError` for too many."""
    wanted = seconds * fps
    if wanted > MAX_FRAMES:
        raise InputError(
            f"{seconds:g} s at {fps:g} fps are {wanted:g} frames; "
            f"at most {MAX_FRAMES} can be asked for"
        )
    return max(1, round(wanted))


def nearest_length(
    seconds: float,
    fps: float,
    nearest: Callable[[int], Sequence[int]],
    piece: int,
    notes: list[str],
) -> int:
    """The length nearest to that many seconds, of those that ``nearest(num_frames)`` gives.

    Adds a note if it is another, of an autoencoder that works in pieces of `piece` frames.
    """
    wanted = seconds * fps
    frames = min(nearest(frames_in(seconds, fps)), key=lambda count: abs(count - wanted))
    if frames != wanted:
        notes.append(in_pieces(seconds, fps, frames, piece))
    return frames


def in_pieces(seconds: float, fps: float, frames: int, piece: int) -> str:
    """Note on a duration that is rounded to whole chunks of `piece` frames."""
    return (
        f"{seconds:g} s become {frames} frames ({frames / fps:.2f} s): "
        f"the autoencoder works in pieces of {piece} frames"
    )


#: Fit of our own models if the request sets none.
DEFAULT_FIT = "crop"


def check_fit(fit: str | None) -> None:
    """Reject an unknown fit."""
    if fit is not None and fit not in _FITTED:
        hint = did_you_mean(fit, _FITTED)
        raise InputError(f"fit must be one of {', '.join(_FITTED)}, got {fit!r}{hint}")


def fit_note(what: str, given: tuple[int, int], size: tuple[int, int], fit: str) -> str | None:
    """Note on an image whose (height, width) has another aspect ratio; None if it is the same."""
    (height, width), (to_height, to_width) = given, size
    if height * to_width == width * to_height:
        return None
    others = " or ".join(way for way in _FITTED if way != fit)
    return (
        f"the {what} is {width}x{height} and is {_FITTED[fit]} to the proportions of "
        f"{to_width}x{to_height} (fit: {others} would be another way)"
    )


def shorter_lengths(num_frames: int, piece: int) -> list[int]:
    """Lengths down to one chunk, each about half of the one before, in whole chunks."""
    lengths = [num_frames]
    while lengths[-1] > piece:
        lengths.append(max(lengths[-1] // 2 // piece, 1) * piece)
    return lengths


def smaller_sizes(height: int, width: int, step: int, least: int) -> list[tuple[int, int]]:
    """Sizes in steps of `step` pixels, each 3/4 of the one before, no side below `least`."""
    sides = [(height, width)]
    while min(sides[-1]) * 3 // 4 >= least:
        height, width = (side * 3 // 4 // step * step for side in sides[-1])
        sides.append((height, width))
    return sides


def smaller_videos(
    settings: Settings, lengths: Sequence[int], sides: Sequence[tuple[int, int]]
) -> Iterator[Settings]:
    """The same video shorter, smaller or both, most pixels first."""
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
    """Frames ``frame_start:frame_stop`` of a video, and the latent frames of exactly these."""

    frame_start: int
    frame_stop: int
    latent_start: int
    latent_stop: int

    @property
    def num_frames(self) -> int:
        return self.frame_stop - self.frame_start


class LatentSizes:
    """Latents of a video by the config of its autoencoder, which codes it in pieces."""

    spatial_factor: int

    def pieces(self, num_frames: int) -> tuple[FrameChunk, ...]:
        """Pieces that a video of `num_frames` is coded in, in order."""
        raise NotImplementedError

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of a video."""
        return self.pieces(num_frames)[-1].latent_stop

    def latent_size(self, num_frames: int, height: int, width: int) -> LatentSize:
        """Latent frames, rows and columns of a video in pixels; sizes are rounded down."""
        factor = self.spatial_factor
        if height < factor or width < factor:
            raise InputError(
                f"height and width must be {factor} pixels or more for this autoencoder, "
                f"got {height} and {width}"
            )
        return LatentSize(self.latent_frames(num_frames), height // factor, width // factor)


class AutoencoderSizes:
    """Sizes from the autoencoder config `vae`, with diffusers' defaults for absent keys."""

    vae: Mapping[str, Any]

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent, along each side."""
        return int(2 ** (len(self.vae.get("block_out_channels", (64,))) - 1))

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return int(self.vae.get("latent_channels", 4))

    @property
    def scaling_factor(self) -> float:
        """Denoiser latents divided by autoencoder latents."""
        return float(self.vae.get("scaling_factor", 0.18215))

    @property
    def force_upcast(self) -> bool:
        """Whether the config says that the autoencoder overflows half precision."""
        return bool(self.vae.get("force_upcast", True))


def check_latents(latents: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raise `InputError` if start noise is given with another shape than `expected`.

    `meaning` explains the shape in the message.
    """
    if latents is None:
        return
    given = tuple(getattr(latents, "shape", ()))
    if given != expected:
        raise InputError(
            f"latents must be an array or tensor of shape {expected} {meaning}, got "
            f"{given or type(latents).__name__}"
        )
