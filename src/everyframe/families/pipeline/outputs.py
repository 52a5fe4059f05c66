"""What a pipeline gives back, whatever its form, as frames and sound. Read next: `stages.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from everyframe.core.errors import EveryframeError, NumericsError
from everyframe.numerics.watch import tensors_in

Array = np.ndarray[Any, Any]

#: What pipelines call their frames.
VIDEOS = ("frames", "videos", "video")
#: As far as a value in 0..1 may be outside of it by rounding.
_ROUNDING = 1e-3
_SOUNDS = ("audio", "audios", "sound")
_RATES = (("vocoder", "output_sampling_rate"), ("audio_vae", "sampling_rate"),
          ("audio_vae", "sample_rate"), ("sound_tokenizer", "sampling_rate"))  # fmt: skip


def num_videos_of(result: Any) -> int:
    """How many videos a result holds."""
    given = _frames_in(result)
    return len(given) if _is_batch(given) else 1


def frames_of(result: Any, index: int = 0) -> Array:
    """One video of a result: float32 (T, H, W, 3) in 0..1, or uint8 where it is given so.

    Takes arrays (B, T, H, W, C), tensors (B, T, C, H, W) or (B, C, T, H, W), and lists of pictures,
    each also without the batch.
    """
    given = _frames_in(result)
    video = given[index] if len(given) and _is_batch(given) else given
    if not len(video):
        raise EveryframeError("the pipeline made a video without frames; ask for a longer one")
    if isinstance(video, torch.Tensor):
        tensor = video.detach().to("cpu", torch.float32)
        is_channels_first = tensor.shape[0] == 3 != tensor.shape[1]
        tensor_TCHW = tensor.movedim(0, 1) if is_channels_first else tensor
        return np.ascontiguousarray(tensor_TCHW.permute(0, 2, 3, 1).numpy())
    frames: Array = np.stack([np.asarray(picture) for picture in video])
    return frames if frames.dtype == np.uint8 else frames.astype(np.float32, copy=False)


def size_of(result: Any) -> tuple[int, int, int] | None:
    """(frames, height, width) of a result of a dry run; None where it holds no frames."""
    given = next((part for name in VIDEOS if (part := _part(result, name)) is not None), None)
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
    """What a person should know of values outside of 0..1, as pipelines of wide range make them."""
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
    """(samples (channels, n) float32 in -1..1, samples a second), or None for a silent video."""
    given = next((part for name in _SOUNDS if (part := _part(result, name)) is not None), None)
    if given is None:
        return None
    rate = _part(result, "sampling_rate") or _rate_of(pipe)
    if rate is None:
        raise EveryframeError(
            "the pipeline made sound and names no sampling rate; please report it"
        )
    samples = given[index] if not hasattr(given, "ndim") or given.ndim == 3 else given
    if isinstance(samples, torch.Tensor):
        samples = samples.detach().to("cpu", torch.float32).numpy()
    samples = np.asarray(samples, np.float32)
    return (samples[None] if samples.ndim == 1 else samples), int(rate)


def check_finite(result: Any, stage: str) -> None:
    """Raise `NumericsError` if an output of latents holds values that are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in tensors_in(result)):
        raise NumericsError(
            f"{stage} made latents that hold values that are not finite; the whole pipeline in "
            "float32 may not"
        )


def _frames_in(result: Any) -> Any:
    given = next((part for name in VIDEOS if (part := _part(result, name)) is not None), None)
    if given is None:
        raise EveryframeError(
            f"the pipeline gave a {type(result).__name__} without frames; please report it"
        )
    return given


def _is_batch(given: Any) -> bool:
    """Whether videos are inside, and not the frames of one."""
    if hasattr(given, "ndim"):
        return bool(given.ndim == 5)
    return isinstance(given[0], list) or getattr(given[0], "ndim", 0) == 4


def _rate_of(pipe: Any) -> int | None:
    for component, name in _RATES:
        config = getattr(getattr(pipe, component, None), "config", None)
        rate = getattr(config, name, None)
        if rate:
            return int(rate)
    return None


def _part(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, dict) else getattr(result, name, None)
