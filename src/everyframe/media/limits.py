"""How large pictures and videos may be that somebody gives us, asked before their pixels are read.

A file of some kilobytes can hold a picture of a gigapixel, or one frame that is shown for hours.
Read next: `read.py`, `pictures.py`, `mp4.py`.
"""

from __future__ import annotations

from everyframe.core.errors import MediaError

#: Pixels of one picture: twice what Pillow warns of, far above what a camera makes.
MOST_PIXELS = 178_956_970
#: Bytes of all frames that are held at once.
MOST_BYTES = 1 << 32
#: Bytes of a record beside a video or in it.
MOST_RECORD_BYTES = 1 << 24


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
