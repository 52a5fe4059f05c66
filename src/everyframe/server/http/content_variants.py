"""Variants of a video that are made from its file on request: a preview, a zip of frames."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from everyframe.media.limits import open_video

#: Frames and longest side of the animated preview, in pixels.
_PREVIEW_FRAMES, _PREVIEW_SIDE, _PREVIEW_QUALITY = 48, 256, 70


def preview_bytes(video: Path) -> bytes:
    """A small animated WebP of the video, with at most 48 of its frames."""
    with open_video(video) as container:
        stream = container.streams.video[0]
        number, rate = stream.frames or 1, float(stream.average_rate or 8)
    step = -(-number // _PREVIEW_FRAMES)
    frames = []
    for place, frame in enumerate(_frames(video)):
        if place % step == 0:
            frame.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
            frames.append(frame)
    file = io.BytesIO()
    frames[0].save(
        file, "WEBP", save_all=True, append_images=frames[1:], loop=0,
        duration=round(1000 * step / rate), quality=_PREVIEW_QUALITY,
    )  # fmt: skip
    return file.getvalue()


def frames_archive(video: Path, folder: Path) -> Path:
    """A zip file in `folder` with each frame of the video as a PNG; the caller deletes it."""
    descriptor, name = tempfile.mkstemp(suffix=".zip", dir=folder)
    try:
        # PNG is compressed already.
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for number, frame in enumerate(_frames(video)):
                data = io.BytesIO()
                frame.save(data, "PNG")
                archive.writestr(f"frame_{number:05d}.png", data.getvalue())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _frames(video: Path) -> Iterator[Image.Image]:
    with open_video(video) as container:
        for frame in container.decode(video=0):
            yield frame.to_image()
