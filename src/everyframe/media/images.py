"""gif, webp and png through Pillow: writers with the mp4 encoder's four methods, and readers.

Gif and webp merge equal neighbouring frames and count time in hundredths (gif) or thousandths
(webp) of a second. The writer therefore rounds the running time and not each duration, so a reader
that knows the frame rate recovers every frame. Pillow writes an animation in one call: all frames
stay in memory until the end, a gif's at one byte per pixel.
"""

from __future__ import annotations

import itertools
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence, PngImagePlugin, UnidentifiedImageError

from everyframe.core.errors import MediaError
from everyframe.core.options import shown
from everyframe.media.limits import check_frames, check_picture, open_picture
from everyframe.media.output_path import FOLDER_RECORD, FRAME_NAME, OutputFormat, exact_fps
from everyframe.media.pixels import Frames
from everyframe.media.record import PNG_KEY, exif_of, read_sidecar, record_of_picture

_WEBP_QUALITY = 90

#: Lowest frame rate accepted from a record; its inverse is the highest.
_SLOWEST = Fraction(1, 100_000)


class AnimationWriter:
    """Collect frames and write them as an animated gif or webp."""

    def __init__(self, path: Path, kind: OutputFormat, fps: Fraction) -> None:
        self._path, self._kind, self._fps = path, kind, fps
        self._images: list[Image.Image] = []

    @property
    def num_frames(self) -> int:
        return len(self._images)

    def add(self, frame: Frames) -> None:
        """Add one frame (H, W, 3); the data is copied."""
        # A copy: the caller may use its buffer again.
        image = Image.fromarray(np.array(frame))
        self._images.append(image.quantize(256) if self._kind is OutputFormat.GIF else image)

    def finish(self, comment: str) -> None:
        """Write the file with its record, then verify frame count and size by reading it."""
        first, rest = self._images[0], self._images[1:]
        tick = 10 if self._kind is OutputFormat.GIF else 1
        ends = [round(Fraction(1000 * i, tick) / self._fps) for i in range(len(rest) + 2)]
        durations = [tick * (b - a) for a, b in itertools.pairwise(ends)]
        if self._kind is OutputFormat.GIF:
            first.save(
                self._path, save_all=True, append_images=rest, duration=durations, loop=0,
                comment=comment.encode("ascii"), optimize=False,
            )  # fmt: skip
        else:
            first.save(
                self._path, save_all=True, append_images=rest, duration=durations, loop=0,
                exif=exif_of(comment), quality=_WEBP_QUALITY, method=4,
            )  # fmt: skip
        frames, _ = read_animation(self._path, is_given=False)
        if frames.shape != (self.num_frames, first.height, first.width, 3):
            raise MediaError(
                f"the file that was written reads as {frames.shape} and not as {self.num_frames} "
                f"frames of {first.width}x{first.height}; it was removed"
            )

    def abort(self) -> None:
        """Discard the frames."""
        self._images.clear()


class PngWriter:
    """Write a single png, or one png per frame into a folder."""

    def __init__(self, path: Path, kind: OutputFormat) -> None:
        self._path, self._kind = path, kind
        self._first: Image.Image | None = None
        self.num_frames = 0
        if kind is OutputFormat.FRAMES:
            path.mkdir()

    def add(self, frame: Frames) -> None:
        """Write one frame (H, W, 3) as ``frame_00000.png``, or hold the only one until `finish`."""
        image = Image.fromarray(np.array(frame))
        if self._kind is OutputFormat.FRAMES:
            image.save(self._path / f"frame_{self.num_frames:05d}.png")
        elif self._first is not None:
            raise MediaError("a .png file holds one frame, and more came; end the name in '/'")
        self._first = image
        self.num_frames += 1

    def finish(self, comment: str) -> None:
        """Write the single png with its record. A folder has its ``record.json`` instead."""
        if self._kind is OutputFormat.PNG and self._first is not None:
            text = PngImagePlugin.PngInfo()
            text.add_text(PNG_KEY, comment)
            self._first.save(self._path, pnginfo=text)

    def abort(self) -> None:
        """Discard the frame; no file is open."""
        self._first = None


def read_animation(
    path: Path, fps: Fraction | None = None, *, is_given: bool = True
) -> tuple[Frames, Fraction]:
    """Read frames (T, H, W, 3) and frame rate of a gif, webp or png, evenly spaced in time.

    The rate is `fps`, else the one in an Everyframe record, else the inverse of the median
    duration. Frames that are shown longer are repeated. Raises `MediaError` if the file can't be
    read to its end, or if it is user input (`is_given`) and needs more memory than `check_frames`
    allows.
    """
    images: list[Frames] = []
    durations: list[int] = []
    name = repr(str(path))
    try:
        with open_picture(path) as picture:
            width, height = picture.size
            check_picture(width, height, name)
            if is_given:
                check_frames(int(getattr(picture, "n_frames", 1)), width, height, name)
            record = record_of_picture(picture)
            for number, image in enumerate(ImageSequence.Iterator(picture)):
                if image.size != (width, height):  # pages of a TIFF; before one is decoded
                    raise MediaError(
                        f"pictures in {name} differ in size: picture 0 is {width}x{height}, "
                        f"picture {number} is {image.width}x{image.height}"
                    )
                rgb = image.convert("RGB")  # decodes, and only then is the duration known
                duration = int(image.info.get("duration", 0))
                images.append(np.asarray(rgb))
                # As browsers do: a frame of 10 ms or less counts as 100 ms.
                durations.append(duration if duration > 10 or record else 100)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        cause = "no picture or video" if isinstance(error, UnidentifiedImageError) else str(error)
        raise MediaError(f"{str(path)!r} can't be read: {cause}") from error
    ends = np.cumsum(durations)
    if fps is None and record is not None:
        fps, count = exact_fps(str(record.get("fps"))), _count_of(record, path)
        if not _SLOWEST <= fps <= 1 / _SLOWEST:
            raise MediaError(f"the record in {name} is broken: fps is {shown(record.get('fps'))}")
    else:
        fps = fps or Fraction(1000, int(np.median(durations)))
        count = max(1, round(Fraction(int(ends[-1]), 1000) * fps))
    if is_given:
        check_frames(count, width, height, name)
    # The frame shown in the middle of each interval.
    middles = (np.arange(count) + 0.5) * float(1000 / fps)
    at = np.minimum(np.searchsorted(ends, middles, side="right"), len(images) - 1)
    return np.stack([images[i] for i in at]), fps


def _count_of(record: dict[str, Any], path: Path) -> int:
    count = record.get("num_frames")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 1_000_000:
        raise MediaError(f"the record in {str(path)!r} is broken: num_frames is {count!r}")
    return count


def read_folder(path: Path, fps: Fraction | None = None) -> tuple[Frames, Fraction]:
    """Read frames (T, H, W, 3) and frame rate of a folder of png files, ordered by name.

    The rate is `fps`, else the one in ``record.json``. Raises `MediaError` if there is no rate, no
    picture, or the sizes differ.
    """
    names = sorted(p.name for p in path.iterdir() if p.suffix.lower() == ".png")
    ours = [name for name in names if FRAME_NAME.fullmatch(name)]
    names = sorted(ours, key=lambda name: (len(name), name)) or names
    if not names:
        raise MediaError(f"folder {os.fspath(path)!r} holds no png files")
    if fps is None:
        record = read_sidecar(path / FOLDER_RECORD)
        if record is None:
            raise MediaError(
                f"folder {os.fspath(path)!r} has no {FOLDER_RECORD} that tells its frame rate; "
                "give fps"
            )
        fps = exact_fps(str(record.get("fps")))
    frames: list[Frames] = []
    for name in names:
        frames.append(read_animation(path / name, fps)[0][0])
        height, width, _ = frames[0].shape
        check_frames(len(frames), width, height, repr(os.fspath(path)))
    for name, frame in zip(names, frames, strict=True):
        if frame.shape != frames[0].shape:
            raise MediaError(
                f"pictures in {os.fspath(path)!r} differ in size: {names[0]!r} is "
                f"{frames[0].shape[1]}x{frames[0].shape[0]}, {name!r} is "
                f"{frame.shape[1]}x{frame.shape[0]}"
            )
    return np.stack(frames), fps
