"""H.264 in mp4: encoder, verification of the written file, and reader of any video.

Colours use the BT.709 matrix in limited range and are tagged so. FFmpeg's default is the BT.601
matrix without a tag; players then guess from the size, and colours shift.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace

from everyframe.core.errors import MediaError
from everyframe.media import limits
from everyframe.media.audio import Audio, add_stream, decode_audio, packets
from everyframe.media.limits import check_frames, check_picture, open_video
from everyframe.media.pixels import Frames, fit_image

_BT709 = 1  # the number of BT.709 in each of H.264's three colour fields (ITU-T H.273)
# A fixed number of threads, whatever the machine: x264 gives the same bytes for the same number.
# `cpu-independent`: its macroblock tree rounds otherwise with each instruction set, and AVX-512's
# reads memory that nobody has written, in pictures of 64 pixels' width and less, so that the same
# frames gave other bytes each time (measured with x264's core 165).
_X264 = {"crf": "17", "preset": "medium", "threads": "4", "x264-params": "cpu-independent=1"}
# FFmpeg's SWS_BICUBIC, FULL_CHR_H_INT, FULL_CHR_H_INP, ACCURATE_RND and BITEXACT: exact, so that
# the processor's instruction set does not choose the colours' last bit. Numbers, because PyAV has
# names for the last four since 18, and 18 needs Python 3.11. One thread: it is as fast, and PyAV 19
# keeps its threads for the next frame, which a process that was forked since waits for forever.
_SCALING = 4 | 0x2000 | 0x4000 | 0x40000 | 0x80000


class Mp4Encoder:
    """Encode frames to `path` as they arrive; `finish` adds the record, audio and faststart.

    The record may be known only at the end, but mp4 stores it in the header, which comes first.
    Frames therefore go to a second file beside `path`, and `finish` copies its packets unchanged
    behind the final header.
    """

    def __init__(self, path: Path, width: int, height: int, fps: Fraction) -> None:
        self._path = path
        self._encoded = path.with_name("encoded")  # no ending: never the target's name
        self._size = (width, height)
        self._fps = fps
        self.num_frames = 0
        self._container = av.open(str(self._encoded), "w", format="mp4")
        stream = self._container.add_stream("libx264", rate=fps, options=_X264)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = ColorRange.MPEG
        self._stream = stream

    def add(self, frame: Frames) -> None:
        """Encode one frame (H, W, 3)."""
        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture = rgb.reformat(
            format="yuv420p",
            src_color_range=ColorRange.JPEG,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=_SCALING,
            threads=1,
        )
        picture.pts, picture.time_base = self.num_frames, 1 / self._fps
        self._container.mux(self._stream.encode(picture))
        self.num_frames += 1

    def finish(self, comment: str, audio: Audio | None = None) -> None:
        """Flush the encoder, write `path` with `comment` and audio, and verify it by reading it."""
        self._container.mux(self._stream.encode())
        self._container.close()
        _copy_with_comment(self._encoded, self._path, comment, audio)
        os.unlink(self._encoded)
        _verify(self._path, self.num_frames, *self._size)

    def abort(self) -> None:
        """Close the unfinished file; the caller deletes it."""
        # Closing writes a trailer, which fails again after a failed write: the first error counts.
        with contextlib.suppress(av.FFmpegError, OSError):
            self._container.close()


def _copy_with_comment(source: Path, target: Path, comment: str, audio: Audio | None) -> None:
    flags = {"movflags": "faststart"}
    with (
        av.open(str(source)) as old,
        av.open(str(target), "w", format="mp4", options=flags) as new,
    ):
        new.metadata["comment"] = comment
        old_stream = old.streams.video[0]
        stream = new.add_stream_from_template(old_stream)
        left = [] if audio is None else list(packets(add_stream(new, audio), audio))
        for packet in old.demux(old_stream):
            if packet.dts is None:  # the last one is empty and only says "end"
                continue
            # Audio precedes the frames it plays with: players read a file from its start.
            while left and left[0].dts * left[0].time_base <= packet.dts * packet.time_base:
                new.mux(left.pop(0))
            packet.stream = stream
            new.mux(packet)
        new.mux(left)


def _verify(path: Path, num_frames: int, width: int, height: int) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        found = sum(1 for packet in container.demux(stream) if packet.size)
        size = (stream.width, stream.height)
    if (found, *size) != (num_frames, width, height):
        raise MediaError(
            f"the video that was written holds {found} frames of {size[0]}x{size[1]} and not "
            f"{num_frames} of {width}x{height}; it was removed"
        )


def read_frames(path: Path, size: tuple[int, int] | None = None) -> tuple[Frames, Fraction]:
    """Read all frames (T, H, W, 3) and the frame rate of a video file.

    With `size` (height, width) each frame is resized as it is read. Otherwise as `iter_frames`.
    """
    return np.stack(list(iter_bounded_frames(path, size))), frame_rate(path)


def iter_bounded_frames(path: Path, size: tuple[int, int] | None = None) -> Iterator[Frames]:
    """Decode frame by frame as `iter_frames`, each resized to `size` (height, width) if given.

    Raises `MediaError` for more frames than may be held at once.
    """
    for count, frame in enumerate(iter_frames(path), start=1):
        height, width = frame.shape[:2] if size is None else size
        check_frames(count, width, height, repr(str(path)))
        yield frame if size is None else fit_image(frame, *size)


def frame_rate(path: Path) -> Fraction:
    """Frames per second of a video file. Raises `MediaError` if it is not a video."""
    with _open(path) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise MediaError(f"{str(path)!r} can't be read as a video: no frames in it")
    return Fraction(rate.numerator, rate.denominator)  # PyAV 19 has a class of its own


def read_audio(path: Path, seconds: float) -> Audio | None:
    """Read the audio of the first `seconds` of a video file; None if it has none.

    Time counts from the first frame; where the audio starts later or ends earlier there is silence.
    More than two channels are mixed to two. Raises `MediaError` if it can't be decoded.
    """
    with _open(path) as container:
        if not container.streams.audio:
            return None
        video, stream = container.streams.video[0], container.streams.audio[0]
        if stream.codec_context is None:
            raise MediaError(_no_sound(path, "its codec is unknown"))
        shown = float((video.start_time or 0) * video.time_base)
        try:
            samples = decode_audio(container, stream, begin=shown, seconds=seconds)
        except (av.FFmpegError, OSError, MediaError) as error:
            raise MediaError(_no_sound(path, _reason(error))) from error
        return None if samples is None else Audio(samples, int(stream.rate))


def _no_sound(path: Path, why: str) -> str:
    return f"the sound of {str(path)!r} can't be decoded ({why}); a copy without sound can be taken"


def iter_frames(path: Path) -> Iterator[Frames]:
    """Decode a video file frame by frame, (H, W, 3) each; one frame is in memory at a time.

    Colours follow the file's tags; an untagged file is taken as BT.601, as FFmpeg does. A phone's
    rotation is applied. Raises `MediaError` if the file can't be read to its end, with the number
    of the first frame that fails, counted from 0.
    """
    name, count, end = str(path), 0, 0.0
    with _open(path) as container:
        stream = container.streams.video[0]
        fps = stream.average_rate or stream.guessed_rate
        check_picture(stream.width, stream.height, repr(name))
        try:
            for frame in container.decode(stream):
                check_picture(frame.width, frame.height, repr(name))
                yield _to_rgb(frame)
                count += 1
                end = frame.time + float(1 / fps) if fps and frame.time is not None else end
        except (av.FFmpegError, OSError) as error:
            raise MediaError(
                f"{name!r} can't be read as a video: frame {count} can't be decoded "
                f"({_reason(error)})"
            ) from error
        duration = float(stream.duration * stream.time_base) if stream.duration else 0.0
        start = float((stream.start_time or 0) * stream.time_base) if stream.time_base else 0.0
    if not count or not fps:
        raise MediaError(f"{name!r} can't be read as a video: no frames in it")
    # Containers round durations: allow two frames.
    if duration and end - start < duration - 2 / float(fps):
        raise MediaError(
            f"{name!r} is cut off: it should last {duration:.2f} s, and ends after "
            f"{end - start:.2f} s, at frame {count}; get the whole file"
        )


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file that must hold a video stream of a known codec."""
    name = str(path)
    try:
        container = open_video(path)
    except (av.FFmpegError, OSError) as error:
        raise MediaError(f"{name!r} can't be read as a video: {_reason(error)}") from error
    with container:
        if not container.streams.video:
            raise MediaError(f"{name!r} holds no video stream")
        if container.streams.video[0].codec_context is None:
            raise MediaError(f"{name!r} is in a codec that can't be read; save it as H.264")
        yield container


def _reason(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.EINVAL:  # so does FFmpeg refuse what is above a limit
        return f"it is damaged, or larger than {limits.MOST_PIXELS:,} pixels"
    return str(getattr(error, "strerror", None) or error)


def _to_rgb(frame: av.VideoFrame) -> Frames:
    rgb = frame.reformat(
        format="rgb24",
        src_colorspace=frame.colorspace,
        src_color_range=frame.color_range,
        dst_color_range=ColorRange.JPEG,
        interpolation=_SCALING,
        threads=1,
    ).to_ndarray()
    turned = np.rot90(rgb, k=round(frame.rotation / 90) % 4)
    return np.ascontiguousarray(turned, dtype=np.uint8)
