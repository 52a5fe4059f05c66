"""`Video`: frames, frame rate, audio and provenance record as one value.

`everyframe.generate` returns it; `Video.save` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError, MediaError
from everyframe.media.output_path import OutputFormat, PathLike, exact_fps, kind_of
from everyframe.media.pixels import Frames, to_uint8
from everyframe.media.record import read_record

if TYPE_CHECKING:
    from everyframe.media.audio import Audio

# Frames turned to 8 bits and encoded at a time, so that a long float video is not held twice.
_PIECE = 16


@dataclass(frozen=True, eq=False, repr=False)
class Video:
    """A video in memory.

    Attributes:
        frames: (T, H, W, 3) RGB, uint8, or float32 in 0..1.
        fps: frames per second; floats become exact fractions.
        record: provenance; may be empty.
        audio: the sound, where the model makes it; only .mp4 stores it.

    Raises:
        InputError: frames of another shape or dtype.
    """

    frames: npt.NDArray[Any]
    fps: Fraction
    record: Mapping[str, Any] = field(default_factory=dict)
    audio: Audio | None = None

    def __post_init__(self) -> None:
        frames = self.frames
        known = frames.dtype == np.uint8 or frames.dtype == np.float32
        if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size or not known:
            raise InputError(
                "frames must be uint8 or float32 (T, H, W, 3) with at least one frame, "
                f"got {frames.dtype} {frames.shape}"
            )
        object.__setattr__(self, "fps", exact_fps(self.fps))

    @property
    def sound(self) -> Audio | None:
        """Earlier name of `audio`."""
        return self.audio

    @property
    def num_frames(self) -> int:
        return int(self.frames.shape[0])

    @property
    def height(self) -> int:
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        return int(self.frames.shape[2])

    @property
    def seconds(self) -> float:
        return float(self.num_frames / self.fps)

    def pieces(self) -> Iterator[Frames]:
        """Yield the frames as uint8 (t, H, W, 3), 16 at a time.

        Raises `NumericsError` as `everyframe.media.pixels.to_uint8` does.
        """
        for start in range(0, self.num_frames, _PIECE):
            yield to_uint8(self.frames[start : start + _PIECE], first_index=start)

    def save(self, path: PathLike, *, sidecar: bool = True) -> Path:
        """Write the video; the ending selects the format. See `everyframe.media.write.write`."""
        from everyframe.media.write import write

        audio = self.audio if kind_of(path) is OutputFormat.MP4 else None
        return write(
            path, self.pieces(), self.fps, self.record or None, sidecar=sidecar, audio=audio
        )

    @classmethod
    def load(cls, path: PathLike) -> Video:
        """Load a video from a file or folder, with its record if there is one, without audio."""
        from everyframe.media.read import read_video

        frames, fps = read_video(path)
        try:
            record = read_record(path)
        except MediaError:  # a video from elsewhere: readable, as we just saw, but not ours
            record = {}
        return cls(frames, fps, record)

    def __repr__(self) -> str:
        return (
            f"<Video: {self.num_frames} frames of {self.width}x{self.height}, {self.fps} fps, "
            f"{self.seconds:.2f} s, {self.frames.dtype}>"
        )
