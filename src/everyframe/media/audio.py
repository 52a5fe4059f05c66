"""Audio track of a video: samples in memory, AAC packets in an mp4.

`everyframe.media.mp4` muxes the packets. No other output format here has room for audio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError, MediaError, NumericsError
from everyframe.media.limits import MOST_BYTES, MOST_RATE

#: Sample rates in Hz that AAC supports (ISO/IEC 14496-3, table of sampling frequencies).
_RATES = (
    8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000,
)  # fmt: skip
_LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, eq=False, repr=False)
class Audio:
    """Audio samples, float32 in -1..1.

    Attributes:
        samples: (channels, n); one channel or two.
        rate: samples per second.

    Raises:
        InputError: another shape or dtype, or a rate of 0 or less.
        NumericsError: values that are not finite; they would play as loud noise.
    """

    samples: npt.NDArray[Any]
    rate: int

    def __post_init__(self) -> None:
        samples = self.samples
        if samples.dtype != np.float32 or samples.ndim != 2 or len(samples) not in _LAYOUTS:
            raise InputError(
                "sound must be float32 (channels, n) with one channel or two, "
                f"got {samples.dtype} {samples.shape}"
            )
        if not np.isfinite(samples).all():
            raise NumericsError("the sound has values that are not finite; nothing is written")
        if not 1 <= self.rate <= MOST_RATE:
            raise InputError(f"the rate of a sound must be 1 to {MOST_RATE}, got {self.rate}")

    @property
    def seconds(self) -> float:
        return int(self.samples.shape[1]) / self.rate

    def __repr__(self) -> str:
        return f"<Sound: {self.seconds:.2f} s, {len(self.samples)} channels, {self.rate} Hz>"


def add_stream(container: Any, audio: Audio) -> Any:
    """Add an AAC stream for this audio to an open output container."""
    stream = container.add_stream("aac", rate=_rate(audio.rate))
    stream.codec_context.layout = _LAYOUTS[len(audio.samples)]
    return stream


def packets(stream: Any, audio: Audio) -> Iterator[Any]:
    """Encode the audio as AAC packets of that stream, in order; resampled if AAC lacks its rate."""
    loud = np.ascontiguousarray(np.clip(audio.samples, -1, 1))
    frame = av.AudioFrame.from_ndarray(loud, format="fltp", layout=_LAYOUTS[len(loud)])
    frame.sample_rate, frame.pts = audio.rate, 0
    yield from stream.encode(frame)
    yield from stream.encode(None)


def decode_audio(
    container: Any, stream: Any, *, begin: float, seconds: float
) -> npt.NDArray[np.float32] | None:
    """Decode the samples (channels, n) of so many seconds from second `begin`, mono or stereo.

    Gaps of the stream are silence; None if it has no audio at all. Memory is bounded by the result:
    a small file may encode hours of silence without saying so in its times.

    Raises:
        MediaError: a rate that no recorder has, or more samples than may be held at once.
    """
    rate, layout = int(stream.rate), _LAYOUTS[min(stream.codec_context.channels, 2)]
    channels, wanted = (1 if layout == "mono" else 2), round(seconds * rate)
    if rate > MOST_RATE or channels * wanted * 4 > MOST_BYTES:
        raise MediaError(
            f"it is too long for its rate: {seconds:.0f} s of {rate:,} samples; at most "
            f"{MOST_RATE:,} a second are read, and {MOST_BYTES / 1e9:.1f} GB at once"
        )
    whole, place, has_any = np.zeros((channels, wanted), np.float32), None, False
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
    for time, piece in _pieces(container, stream, resampler):
        place = round((time - begin) * rate) if place is None else place
        if time > begin + seconds or place >= wanted:
            break
        heard = piece[:, max(-place, 0) :][:, : wanted - max(place, 0)]
        whole[:, max(place, 0) : max(place, 0) + heard.shape[1]] = heard
        place, has_any = place + piece.shape[1], has_any or heard.size > 0
    return np.nan_to_num(whole, copy=False) if has_any else None


def _pieces(container: Any, stream: Any, resampler: Any) -> Iterator[tuple[float, Any]]:
    """Resampled samples of each decoded frame in order, and the frame's time in seconds."""
    time = 0.0
    for frame in container.decode(stream):
        time = float(frame.time or 0)
        yield from ((time, piece.to_ndarray()) for piece in resampler.resample(frame))
    yield from ((time, piece.to_ndarray()) for piece in resampler.resample(None))


def _rate(rate: int) -> int:
    """Lowest AAC rate that loses nothing, or the highest AAC rate."""
    return next((known for known in _RATES if known >= rate), _RATES[-1])
