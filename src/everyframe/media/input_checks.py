"""Check that input pictures and videos exist, before any long work.

Loads neither numpy nor FFmpeg and opens no file; `read.py` finds out whether it is a picture.
"""

from __future__ import annotations

import os

from everyframe.core.errors import MediaError
from everyframe.core.paths import check_path
from everyframe.media.output_path import PathLike


def check_image(path: PathLike) -> None:
    """Raise `MediaError` if the file does not exist."""
    name = check_path(path, "image")
    if not os.path.isfile(name):
        what = "is a folder" if os.path.isdir(name) else "does not exist"
        raise MediaError(f"image {name!r} {what}")


def check_video(path: PathLike) -> None:
    """Raise `MediaError` if neither a file nor a folder of frames exists there."""
    name = check_path(path, "video")
    if not os.path.exists(name):
        raise MediaError(f"video {name!r} does not exist")
    if not (os.path.isfile(name) or os.path.isdir(name)):  # a pipe may never end, nor begin
        raise MediaError(f"video {name!r} is neither a file nor a folder of frames")
