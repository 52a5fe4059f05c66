"""Convert the output of a pipeline's call to frames and sound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from everyframe.core.errors import CheckpointError, EveryframeError, NumericsError
from everyframe.media.limits import MOST_RATE
from everyframe.numerics.tensor_stats import iter_tensors

Array = np.ndarray[Any, Any]

#: Names of the frames in a pipeline's output.
VIDEOS = ("frames", "videos", "video")
#: Tolerated rounding error of values in 0..1.
_ROUNDING = 1e-3
_SOUNDS = ("audio", "audios", "sound")
_RATES = (("vocoder", "output_sampling_rate"), ("audio_vae", "sampling_rate"),
          ("audio_vae", "sample_rate"), ("sound_tokenizer", "sampling_rate"))  # fmt: skip


def num_videos_of(result: Any) -> int:
    """Number of videos in a result."""
    given = _frames_in(result)
    return len(given) if _is_batch(given) else 1


def frames_of(result: Any, index: int = 0) -> Array:
    """One video of a result, (T, H, W, 3): float32 in 0..1, or uint8 if the pipeline returns that.

    Accepts arrays (B, T, H, W, C), tensors (B, T, C, H, W) or (B, C, T, H, W), and lists of
    images, each also without the batch.

    Raises:
        EveryframeError: the result has no frames.
        CheckpointError: what it has is no frames, or they have several sizes.
    """
    given = _frames_in(result)
    video = given[index] if _is_batch(given) else given
    if not len(video):
        raise EveryframeError("the pipeline made a video without frames; ask for a longer one")
    if isinstance(video, torch.Tensor) and video.ndim == 4:
        is_channels_first = video.shape[0] == 3 != video.shape[1]
        kind = torch.uint8 if video.dtype == torch.uint8 else torch.float32
        video = video.detach().to("cpu", kind).movedim(0 if is_channels_first else 1, -1).numpy()
    pictures = [np.asarray(picture) for picture in video]
    shapes = sorted({picture.shape for picture in pictures})
    if len(shapes) > 1 or len(shapes[0]) != 3 or shapes[0][-1] != 3:
        raise CheckpointError(
            "the pipeline's call must return pictures (H, W, 3) of one size as a video's frames, "
            f"got {' and '.join(map(str, shapes[:2]))}"
        )
    frames: Array = np.stack(pictures)
    return frames if frames.dtype == np.uint8 else frames.astype(np.float32, copy=False)


def size_of(result: Any) -> tuple[int, int, int] | None:
    """(frames, height, width) of a dry run's result; None if it has no frames."""
    given = _first_part(result, VIDEOS)
    if given is None or not len(given):
        return None
    video = given[0] if _is_batch(given) else given
    if not isinstance(video, torch.Tensor):
        first = np.asarray(video[0])
        return len(video), first.shape[0], first.shape[1]
    if video.ndim != 4 or 3 not in video.shape:
        return None
    # Channels come after the frames, before them, or last.
    axis = next(axis for axis in (1, 0, 3) if video.shape[axis] == 3)
    frames, height, width = (size for at, size in enumerate(video.shape) if at != axis)
    return int(frames), int(height), int(width)


def beyond_range(frames: Array) -> str | None:
    """Message about values outside 0..1 (high dynamic range pipelines); None if there are none."""
    if frames.dtype == np.uint8:
        return None
    share = float(((frames < -_ROUNDING) | (frames > 1 + _ROUNDING)).mean())
    if not share:
        return None
    return (
        f"{share:.0%} of the values are beyond what a file's frames hold (0 to 1), the largest is "
        f'{float(frames.max()):.4g}; they are cut off there, and output="float" keeps them'
    )


def sound_of(result: Any, pipe: Any, index: int = 0) -> tuple[Array, int] | None:
    """(samples (channels, n) float32 in -1..1, samples per second); None for a silent video.

    Raises:
        EveryframeError: the pipeline has no known sampling rate.
        CheckpointError: its sampling rate is no number of samples.
    """
    given = _first_part(result, _SOUNDS)
    if given is None:
        return None
    rate = _part(result, "sampling_rate") or _rate_of(pipe)
    if rate is None:
        raise EveryframeError(
            "the pipeline made sound and names no sampling rate; please report it"
        )
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1 <= rate <= MOST_RATE:
        raise CheckpointError(
            f"the sampling rate of the pipeline's sound must be 1 to {MOST_RATE}, got {rate!r:.100}"
        )
    samples = given[index] if not hasattr(given, "ndim") or given.ndim == 3 else given
    if isinstance(samples, torch.Tensor):
        samples = samples.detach().to("cpu", torch.float32).numpy()
    samples = np.asarray(samples, np.float32)
    return (samples[None] if samples.ndim == 1 else samples), int(rate)


def check_finite(result: Any, stage: str) -> None:
    """Raise `NumericsError` for latents with values that are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in iter_tensors(result)):
        raise NumericsError(
            f"{stage} made latents that hold values that are not finite; the whole pipeline in "
            "float32 may not"
        )


def _frames_in(result: Any) -> Any:
    given = _first_part(result, VIDEOS)
    if given is None:
        raise CheckpointError(
            f"the pipeline's call must return an output with {', '.join(VIDEOS[:-1])} or "
            f"{VIDEOS[-1]}, got a {type(result).__name__} without"
        )
    return given


def _is_batch(given: Any) -> bool:
    """Whether it holds videos, and not the frames of one video."""
    if hasattr(given, "ndim"):
        return bool(given.ndim == 5)
    return bool(len(given)) and (isinstance(given[0], list) or getattr(given[0], "ndim", 0) == 4)


def _rate_of(pipe: Any) -> Any:
    for component, name in _RATES:
        config = getattr(getattr(pipe, component, None), "config", None)
        rate = getattr(config, name, None)
        if rate:
            return rate
    return None


def _first_part(result: Any, names: Iterable[str]) -> Any:
    """The first of these parts that the result has; None if it has none."""
    return next((part for name in names if (part := _part(result, name)) is not None), None)


def _part(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, dict) else getattr(result, name, None)
