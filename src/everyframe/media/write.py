"""Write a video frame by frame, atomically: the result is a complete file or none.

Output goes to a hidden folder beside the target and is renamed once it is complete and verified by
reading it back. On any error, including Ctrl-C, the hidden folder is deleted and an older file of
the same name stays unchanged. A killed process leaves ``.everyframe-….partial``, which can be
deleted. The encoders are `everyframe.media.mp4` and `everyframe.media.images`.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Protocol

import av
import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError, MediaError
from everyframe.core.paths import is_disk_full
from everyframe.media.audio import Audio
from everyframe.media.images import AnimationWriter, PngWriter
from everyframe.media.mp4 import Mp4Encoder
from everyframe.media.output_path import (
    OutputFormat,
    PathLike,
    check_output,
    exact_fps,
    is_of_frames,
    sidecar_of,
)
from everyframe.media.pixels import Frames
from everyframe.media.record import compact, complete, readable

Record = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class _Encoder(Protocol):
    @property
    def num_frames(self) -> int: ...
    def add(self, frame: Frames) -> None: ...
    def finish(self, comment: str) -> None: ...
    def abort(self) -> None: ...


class VideoWriter:
    """Context manager that writes a video to `path` as its frames arrive.

    ``with VideoWriter("clip.mp4", 24, record) as writer: writer.add(piece)``. The file appears when
    the block ends without an error. `record` may be a function; it is called after the last frame.
    ``sidecar=False`` omits ``clip.json`` (a folder of frames always gets ``record.json``, which
    holds its frame rate). Only mp4 stores audio; see `holds_audio`.
    """

    def __init__(
        self,
        path: PathLike,
        fps: Fraction | float | str,
        record: Record = None,
        *,
        sidecar: bool = True,
    ) -> None:
        self._fps = exact_fps(fps)
        self._kind = check_output(path, fps=self._fps)
        self._given = path
        self.path = Path(path)
        self._record = record
        if not callable(record):
            compact(record or {})  # what JSON can't hold should fail now and not after the run
        self._sidecar = sidecar and record is not None and self._kind is not OutputFormat.FRAMES
        self._work: Path | None = None
        self._encoder: _Encoder | None = None
        self._shape: tuple[int, ...] = ()
        self._audio: Audio | None = None

    @property
    def holds_audio(self) -> bool:
        """Whether this output format can store audio."""
        return self._kind is OutputFormat.MP4

    def add_audio(self, audio: Audio) -> None:
        """Set the audio, at any time before the end.

        Raises `MediaError` if the format can't store it.
        """
        if not self.holds_audio:
            raise MediaError(f"{str(self.path)!r} can't hold sound; an .mp4 can")
        self._audio = audio

    @property
    def _target(self) -> Path:
        """Real path that is written; a symbolic link at `path` stays a link."""
        return Path(os.path.realpath(self.path))

    @property
    def _name(self) -> str:
        """File name whose ending gives the format; a link's target may have another ending."""
        return os.path.basename(os.path.abspath(self.path))

    def __enter__(self) -> VideoWriter:
        return self

    def add(self, piece: npt.NDArray[Any]) -> None:
        """Append frames (t, H, W, 3), uint8, of the same H and W as all earlier ones.

        Raises `MediaError` for a size that the format can't hold or a full disk, and `InputError`
        for another dtype or shape.
        """
        if piece.dtype != np.uint8 or piece.ndim != 4 or piece.shape[-1] != 3:
            raise InputError(
                f"frames must be uint8 (t, H, W, 3), got {piece.dtype} {piece.shape}; "
                "everyframe.media.pixels.to_uint8 makes them of floats"
            )
        if self._shape and piece.shape[1:] != self._shape:
            raise InputError(f"frames must all be {self._shape}, got {piece.shape[1:]}")
        try:
            if self._encoder is None:
                self._encoder = self._open(piece.shape[2], piece.shape[1])
                self._shape = piece.shape[1:]
            for frame in piece:
                self._encoder.add(frame)
        except (OSError, av.FFmpegError) as error:
            raise _explain(error, self.path) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._finish()
            elif self._encoder is not None:
                self._encoder.abort()
        finally:
            if self._work is not None:
                # The file is discarded; an error here must not hide the original one.
                shutil.rmtree(self._work, ignore_errors=True)

    def _open(self, width: int, height: int) -> _Encoder:
        check_output(self._given, width, height)
        target = self._target
        self._work = Path(
            tempfile.mkdtemp(prefix=".everyframe-", suffix=".partial", dir=target.parent)
        )
        place = self._work / self._name
        if self._kind is OutputFormat.MP4:
            return Mp4Encoder(place, width, height, self._fps)
        if self._kind in (OutputFormat.PNG, OutputFormat.FRAMES):
            return PngWriter(place, self._kind)
        return AnimationWriter(place, self._kind, self._fps)

    def _finish(self) -> None:
        if self._encoder is None or self._work is None or not self._encoder.num_frames:
            raise MediaError(f"no frames came for {str(self.path)!r}; nothing was written")
        target = self._target
        given = self._record() if callable(self._record) else self._record
        record = complete(given, self._fps, self._encoder.num_frames)
        done = False
        try:
            if isinstance(self._encoder, Mp4Encoder):
                self._encoder.finish(compact(record), self._audio)
            else:
                self._encoder.finish(compact(record))
            place = self._work / self._name
            sidecar = sidecar_of(self._given).name
            if self._kind is OutputFormat.FRAMES:
                (place / sidecar).write_bytes(readable(record))
            elif self._sidecar:
                (self._work / sidecar).write_bytes(readable(record))
            _to_disk(place)
            _replace(place, target)
            if self._sidecar:
                # Second, because the record inside the video takes precedence.
                os.replace(self._work / sidecar, target.with_name(sidecar))
            done = True
        except (OSError, av.FFmpegError) as error:
            raise _explain(error, self.path) from error
        finally:
            if not done:
                self._encoder.abort()


def write(
    path: PathLike,
    pieces: Iterable[npt.NDArray[Any]],
    fps: Fraction | float | str,
    record: Record = None,
    *,
    sidecar: bool = True,
    audio: Audio | None = None,
) -> Path:
    """Write `pieces`, uint8 arrays (t, H, W, 3), to `path` as they arrive; see `VideoWriter`.

    The ending selects the format: ``.mp4`` (H.264, yuv420p, crf 17, faststart), ``.gif``,
    ``.webp``, ``.png`` (one frame); no ending or ``/`` means a folder of ``frame_00000.png``, ….
    The same frames give the same bytes. Raises `MediaError` (one line) if writing fails; then, and
    when `pieces` raises, no new file is left on disk.
    """
    with VideoWriter(path, fps, record, sidecar=sidecar) as writer:
        if audio is not None:
            writer.add_audio(audio)
        for piece in pieces:
            writer.add(piece)
    return writer.path


def _to_disk(place: Path) -> None:
    """Flush the file to disk, so that a power failure can't leave an empty one."""
    if place.is_file():
        # Opened for writing because Windows flushes no read-only file.
        with place.open("r+b") as file:
            os.fsync(file.fileno())


def _replace(new: Path, target: Path) -> None:
    """Move `new` to `target`.

    An existing folder is first moved aside, as a rename can't replace it.

    Foreign files that were added to the old folder meanwhile move into the new one.
    """
    if not (new.is_dir() and target.exists()):
        os.replace(new, target)
        return
    old = new.with_name("replaced")
    os.rename(target, old)
    moved: list[str] = []
    try:
        for entry in [entry for entry in old.iterdir() if not is_of_frames(entry)]:
            if os.path.lexists(new / entry.name):
                raise FileExistsError(errno.EEXIST, f"{entry.name} was put there meanwhile")
            os.rename(entry, new / entry.name)
            moved.append(entry.name)
        os.rename(new, target)
    except BaseException:
        for name in moved:
            os.rename(new / name, old / name)
        os.rename(old, target)
        raise


def _explain(error: Exception, path: Path) -> MediaError:
    if getattr(error, "errno", None) == errno.EFBIG:
        return MediaError(
            f"can't write {str(path)!r}: no file may be as large there; the unfinished file was "
            "removed; raise the limit of ulimit -f, or choose another output"
        )
    if is_disk_full(error):
        return MediaError(
            f"can't write {str(path)!r}: the disk is full; the unfinished file was removed; "
            "free some space, or choose another output"
        )
    reason = getattr(error, "strerror", None) or error
    return MediaError(f"can't write {str(path)!r}: {reason}; the unfinished file was removed")


class FrameSpool:
    """Spool frames of several videos, uint8 (t, H, W, 3), in a temporary file beside the output."""

    def __init__(self, beside: PathLike) -> None:
        self._folder = Path(os.path.abspath(beside)).parent
        self._file: IO[bytes] | None = None
        self._pieces: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def put(self, key: int, piece: Frames) -> None:
        """Append frames to the video of that key. Raises `MediaError` if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - see close
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(np.ascontiguousarray(piece).data)
            self._file.flush()
        except OSError as error:
            raise MediaError(
                f"frames of later videos can't be stored in {str(self._folder)!r}: "
                f"{error.strerror or error}; free some space, or ask for fewer videos at once"
            ) from error
        self._pieces.setdefault(key, []).append((start, piece.shape))

    def take(self, key: int) -> Iterator[Frames]:
        """Yield the frames of that key in order, once; they leave the spool."""
        for start, shape in self._pieces.pop(key, ()):
            assert self._file is not None
            self._file.seek(start)
            data = self._file.read(int(np.prod(shape)))
            yield np.frombuffer(data, np.uint8).reshape(shape)

    def close(self) -> None:
        """Delete the spool and everything in it."""
        if self._file is not None:
            self._file.close()
        self._file, self._pieces = None, {}
