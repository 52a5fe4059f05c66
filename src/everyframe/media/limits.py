"""Size limits for input pictures and videos, checked before their pixels are decoded.

A file of a few kilobytes can hold a gigapixel picture, or one frame shown for hours.
"""

from __future__ import annotations

from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING, Any

from everyframe.core.errors import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from PIL.ImageFile import ImageFile

#: Largest input picture in pixels: twice Pillow's warning limit, far above any camera.
MOST_PIXELS = 178_956_970
#: Largest size in bytes of all frames held in memory at once (4 GiB).
MOST_BYTES = 1 << 32
#: Highest sampling rate of a sound in samples per second: that of the fastest recorders.
MOST_RATE = 768_000
#: Largest record in bytes, embedded or sidecar (16 MiB).
MOST_RECORD_BYTES = 1 << 24

#: Allowed picture formats. Pillow knows more, and some of those start another program.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "TIFF", "BMP", "PPM", "TGA", "AVIF", "JPEG2000")
#: Allowed FFmpeg formats and protocols. FFmpeg also reads playlists, which name other files and
#: addresses.
FFMPEG_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": (
        "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,gif,apng,"
        "h264,hevc,av1,obu,ivf,m4v,mjpeg,nut,yuv4mpegpipe,dv,mxf,rm"
    ),
}


def open_picture(path: str | PathLike[str]) -> ImageFile:
    """Open a picture of an allowed format. Pillow's errors pass through."""
    from PIL import Image

    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    return Image.open(path, formats=known)


def open_video(
    source: str | PathLike[str] | BytesIO, most_pixels: int | None = None
) -> InputContainer:
    """Open a video container from that local file, or bytes, alone. PyAV's errors pass through.

    No frame above `most_pixels`, by default `MOST_PIXELS`, is decoded. The limit applies from the
    start, since FFmpeg decodes frames on opening to find their size, and each frame may be larger
    than the header says or than the one before. It counts rows in whole vectors. A stream whose
    size is only known from a frame above the limit has the size 0x0; one of an unknown codec has no
    `codec_context`. Tags that are not valid UTF-8
    don't prevent reading.
    """
    import av

    # PyAV 19 takes any tag, and has no such option.
    is_lenient = int(av.__version__.partition(".")[0]) >= 19
    tags: dict[str, Any] = {} if is_lenient else {"metadata_errors": "replace"}
    limit = {"max_pixels": str(MOST_PIXELS if most_pixels is None else most_pixels)}
    container: InputContainer = av.open(
        source if isinstance(source, BytesIO) else str(source),
        options=limit,
        container_options=FFMPEG_OPTIONS,
        **tags,
    )
    for stream in container.streams.video:
        if stream.codec_context is not None:  # what opened the container forgets them
            stream.codec_context.options = limit
    return container


def check_picture(width: int, height: int, name: str) -> None:
    """Raise `MediaError` for a picture above `MOST_PIXELS`."""
    if width * height > MOST_PIXELS:
        raise MediaError(
            f"{name} is too large: {width}x{height} pixels; at most {MOST_PIXELS:,} are read, so "
            "save it smaller"
        )


def check_frames(count: int, width: int, height: int, name: str) -> None:
    """Raise `MediaError` for RGB frames that need more than `MOST_BYTES`."""
    if count * width * height * 3 > MOST_BYTES:
        raise MediaError(
            f"{name} is too long for its size: {count} frames of {width}x{height} take "
            f"{count * width * height * 3 / 1e9:.1f} GB, at most {MOST_BYTES / 1e9:.1f} GB are "
            "read at once; cut it, or save it smaller"
        )
