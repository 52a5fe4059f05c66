"""Small pictures of a video that is being made: one frame as a JPEG file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from everyframe.media.pixels import Frames

#: Pixels of the longer side, and most bytes of the file.
LONG_SIDE, MAX_BYTES = 256, 20_000
#: Comment in each file, near its beginning.
_COMMENT = b"everyframe preview"


def encode_preview(frame: Frames) -> bytes:
    """JPEG file of a frame (H, W, 3) of uint8, of `MAX_BYTES` at most."""
    picture = Image.fromarray(np.ascontiguousarray(frame))
    for quality in (80, 60, 40, 20, 5):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality, comment=_COMMENT)
        if file.tell() <= MAX_BYTES:
            break
    return file.getvalue()


def is_preview(path: Path) -> bool:
    """Whether the file is a preview, as an interrupted run leaves one. Raises `OSError`."""
    with path.open("rb") as file:
        return _COMMENT in file.read(256)
