"""Frame source: iterate over input frames repeatedly without loading them all at once.

`open_frames` accepts a picture, a folder of pictures, a video or arrays. `survey` reads every frame
once to get count and size, so unreadable input is reported before anything is computed. A gif or
webp is held whole in memory, because Pillow can't decode a frame without the ones before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everyframe.core.errors import InputError, MediaError
from everyframe.core.paths import expand_path
from everyframe.core.request import Request
from everyframe.media.limits import check_picture, open_picture
from everyframe.media.output_path import FOLDER_RECORD, FRAME_NAME, exact_fps
from everyframe.media.pixels import Frames
from everyframe.media.read import Background, num_pictures, read_image
from everyframe.media.record import read_sidecar

if TYPE_CHECKING:
    from everyframe.media.audio import Audio

#: File endings of pictures that a folder of frames may hold.
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")


@dataclass(frozen=True)
class FrameSource:
    """Frames, uint8 (H, W, 3); each call of `read` starts at the first one.

    Attributes:
        name: for messages; contains no folder.
        read: returns a new iterator over the frames.
        is_still: a single picture, which may stand for every frame.
        fps: None if the source has no rate.
        audio: returns the audio of so many seconds from the first frame, or None.
    """

    name: str
    read: Callable[[], Iterator[Frames]]
    is_still: bool = False
    fps: Fraction | None = None
    audio: Callable[[float], Audio | None] = lambda seconds: None


@dataclass(frozen=True)
class FrameCount:
    """Number of frames of a source, and their size in pixels."""

    num_frames: int
    height: int
    width: int


def open_frames(given: Any, *, what: str, under: Background = "white") -> FrameSource:
    """Open a file, folder, Pillow image, array or sequence of these as a `FrameSource`.

    Arrays are one picture, (H, W) or (H, W, C), or frames (T, H, W, C), as in `read_image`. `under`
    is the colour behind transparent pixels; `what` is the option's name, for errors. Raises
    `MediaError` for input that is missing or holds nothing readable.
    """
    if isinstance(given, (str, os.PathLike)):
        return _of_path(expand_path(given, what), what, under)
    if (isinstance(given, np.ndarray) and given.ndim == 4) or isinstance(given, (list, tuple)):
        if not len(given):
            raise MediaError(f"{what} holds no frames")
        return FrameSource("frames", lambda: _read_pictures(given, under))
    if getattr(given, "n_frames", 1) > 1:
        raise InputError(
            f"{what} is an animated picture of {given.n_frames} frames; give the path of its file"
        )
    return FrameSource("picture", lambda: _read_pictures([given], under), is_still=True)


def survey(
    source: FrameSource, what: str, look: Callable[[int, Frames], None] | None = None
) -> FrameCount:
    """Read every frame once, pass each to `look`, and return count and size.

    Raises `MediaError` for a frame that can't be read or differs in size from the first.
    """
    count, shape = 0, (0, 0)
    for frame in source.read():
        if not count:
            shape = frame.shape[:2]
        if frame.shape[:2] != shape:
            raise MediaError(
                f"frames of {what} differ in size: frame 0 is {shape[1]}x{shape[0]}, "
                f"frame {count} is {frame.shape[1]}x{frame.shape[0]}"
            )
        if look is not None:
            look(count, frame)
        count += 1
    return FrameCount(count, shape[0], shape[1])


def picture_files(folder: Path) -> list[Path]:
    """Pictures of a folder, in the order of our frame numbers, else of their names."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    ours = [path for path in files if FRAME_NAME.fullmatch(path.name)]
    return sorted(ours, key=lambda path: (len(path.name), path.name)) or files


def num_animated(path: str | os.PathLike[str]) -> int:
    """Number of frames of a picture file; 1 for a still picture, 0 if Pillow can't open it."""
    from PIL import UnidentifiedImageError

    try:
        with open_picture(path) as picture:
            check_picture(picture.width, picture.height, repr(os.fspath(path)))
            return num_pictures(picture)
    except UnidentifiedImageError:
        return 0
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(f"{os.fspath(path)!r} can't be read: {error}") from error


def _of_path(path: Path, what: str, under: Background) -> FrameSource:
    if path.is_dir():
        files = picture_files(path)
        if not files:
            raise MediaError(
                f"{what}: folder {str(path)!r} holds no pictures; endings that are read are "
                f"{', '.join(PICTURES)}"
            )
        return FrameSource(
            path.name, lambda: _read_pictures(files, under), fps=_rate_of_folder(path)
        )
    if not path.is_file():
        raise MediaError(f"{what}: {str(path)!r} does not exist")
    count = num_animated(path)
    if count == 1:
        return FrameSource(path.name, lambda: _read_pictures([path], under), is_still=True)
    if count > 1:
        from everyframe.media.images import read_animation

        frames, fps = read_animation(path)
        return FrameSource(path.name, lambda: iter(frames), fps=fps)
    # Loaded here: pictures need no FFmpeg.
    from everyframe.media.mp4 import frame_rate, iter_frames, read_audio

    return FrameSource(
        path.name, lambda: iter_frames(path), fps=frame_rate(path), audio=partial(read_audio, path)
    )


def _read_pictures(pictures: Iterable[Any], under: Background) -> Iterator[Frames]:
    return (read_image(picture, under=under) for picture in pictures)


def _rate_of_folder(folder: Path) -> Fraction | None:
    record = read_sidecar(folder / FOLDER_RECORD)
    return None if record is None else exact_fps(str(record.get("fps")))


def check_given(request: Request) -> None:
    """Raise `MediaError` for an input picture or video of the request that can't be read."""
    pictures = [each for each in (request.image, request.last_image) if each is not None]
    is_file = isinstance(request.extend, (str, os.PathLike))
    if not pictures and not is_file:
        return
    for picture in pictures:
        read_image(picture)
    if is_file:
        next(open_frames(request.extend, what="extend").read(), None)
