"""How large pictures and videos may be that somebody gives us, asked before their pixels are read.

A file of some kilobytes can hold a picture of a gigapixel, or one frame that is shown for hours.
Read next: `read.py`, `images.py`, `mp4.py`.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from everyframe.core.errors import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from PIL.ImageFile import ImageFile

#: Pixels of one picture: twice what Pillow warns of, far above what a camera makes.
MOST_PIXELS = 178_956_970
#: Bytes of all frames that are held at once.
MOST_BYTES = 1 << 32
#: Bytes of a record beside a video or in it.
MOST_RECORD_BYTES = 1 << 24

#: Formats of pictures that are read. Pillow knows others, of which some start another program.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "TIFF", "BMP", "PPM", "TGA", "AVIF", "JPEG2000")
#: What FFmpeg may take a file for, and where it may read from. It knows playlists too, which name
#: other files and addresses.
FFMPEG_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": (
        "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,gif,apng,"
        "h264,hevc,av1,obu,ivf,m4v,mjpeg,nut,yuv4mpegpipe,dv,mxf,rm"
    ),
}


def open_picture(path: str | PathLike[str]) -> ImageFile:
    """A picture of a format that is read; what Pillow raises for what is none."""
    from PIL import Image

    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    return Image.open(path, formats=known)


def open_video(path: str | PathLike[str]) -> InputContainer:
    """The container of a video file, read from that file alone; what PyAV raises for what is none.

    Tags that are not UTF-8 text are no reason to refuse the frames.
    """
    import av

    options = FFMPEG_OPTIONS
    container: InputContainer
    container = av.open(str(path), container_options=options, metadata_errors="replace")
    return container


def check_picture(width: int, height: int, name: str) -> None:
    """Raise `MediaError` for a picture of more pixels than are read."""
    if width * height > MOST_PIXELS:
        raise MediaError(
            f"{name} is too large: {width}x{height} pixels; at most {MOST_PIXELS:,} are read, so "
            "save it smaller"
        )


def check_frames(count: int, width: int, height: int, name: str) -> None:
    """Raise `MediaError` for frames that take more memory than is given to them."""
    if count * width * height * 3 > MOST_BYTES:
        raise MediaError(
            f"{name} is too long for its size: {count} frames of {width}x{height} take "
            f"{count * width * height * 3 / 1e9:.1f} GB, at most {MOST_BYTES / 1e9:.1f} GB are "
            "read at once; cut it, or save it smaller"
        )
