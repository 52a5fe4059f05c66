"""Pictures and videos that clients send: checked by their content, stored by their hash.

A file's name is never used. Its header determines format and size; the worker decodes the pixels.
"""

from __future__ import annotations

import base64
import binascii
import io
import urllib.parse
from dataclasses import dataclass

from everyframe.core.bytes import format_bytes
from everyframe.core.errors import MediaError
from everyframe.server.data_folder import DataFolder
from everyframe.server.errors import ApiError
from everyframe.server.settings import Limits

#: Pillow's name of a format -> the ending of its files.
_PICTURES = {
    "PNG": "png", "JPEG": "jpg", "MPO": "jpg", "WEBP": "webp", "GIF": "gif", "TIFF": "tif",
    "BMP": "bmp", "AVIF": "avif",
}  # fmt: skip
#: FFmpeg's name of a format -> the ending of its files.
_VIDEOS = {
    "mp4": "mp4",
    "matroska": "mkv",
    "avi": "avi",
    "mpegts": "ts",
    "ogg": "ogv",
    "flv": "flv",
}


@dataclass(frozen=True)
class StoredMedia:
    """A picture or video in the data folder.

    Attributes:
        file: path relative to the data folder, named by the content.
        shape: the part that a plan depends on: width and height, and for a video its hash.
    """

    file: str
    shape: str


def bytes_of_data_url(url: str, param: str, limits: Limits) -> bytes:
    """Content of a ``data:`` URL. Raises `ApiError` if it is damaged or too large."""
    head, comma, payload = url.partition(",")
    if not comma:
        raise ApiError("invalid_value", f"{param} is a data URL without a comma", param)
    if len(payload) > limits.body_bytes * 4 // 3 + 4:
        raise ApiError("too_large", f"{param} is too large", param)
    try:
        if not head.endswith(";base64"):
            return urllib.parse.unquote_to_bytes(payload)
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        text = f"{param} is no data URL that can be read: {error}"
        raise ApiError("invalid_value", text, param) from None


def store_media(
    data: bytes, param: str, wanted: str, folder: DataFolder, limits: Limits
) -> StoredMedia:
    """Check a picture or video and store it; `wanted` is a value of `data_folder.MEDIA`.

    Raises:
        ApiError: it is empty, no such file, or over a limit.
    """
    if not data:
        raise ApiError("invalid_value", f"{param} is empty", param)
    if "picture" in wanted:
        ending = _picture(data, param, limits)
        if ending is not None:
            name, size = ending
            return StoredMedia(_store_input(folder, data, name), size)
    if "video" in wanted:
        ending = _video(data, param, limits)
        if ending is not None:
            name, size = ending
            file = _store_input(folder, data, name)
            return StoredMedia(file, f"{size} {file}")
    raise ApiError("invalid_value", f"{param} is no {wanted} that can be read", param)


def _store_input(folder: DataFolder, data: bytes, ending: str) -> str:
    try:
        return folder.add_input(data, ending)
    except OSError as error:
        text = f"the server can't store uploads: {error.strerror or error}"
        raise ApiError("storage_unavailable", text, headers={"retry-after": "30"}) from error


def _picture(data: bytes, param: str, limits: Limits) -> tuple[str, str] | None:
    """Ending and size of a picture, by its header; None if it is not a picture."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    try:
        with Image.open(
            io.BytesIO(data), formats=[*(_PICTURES.keys() & Image.OPEN.keys())]
        ) as read:
            width, height = read.size
            ending = _PICTURES[read.format or ""]
            if width * height <= limits.picture_pixels:
                read.verify()
    except UnidentifiedImageError:
        return None
    except Image.DecompressionBombError:
        raise ApiError("too_large", _too_many_pixels(param, limits), param) from None
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise almost any
        raise ApiError("invalid_value", f"{param} is damaged: {error}", param) from None
    if width * height > limits.picture_pixels:
        raise ApiError("too_large", _too_many_pixels(param, limits, f"{width}x{height}"), param)
    return ending, f"{width}x{height}"


def _too_many_pixels(param: str, limits: Limits, size: str = "that size") -> str:
    return (
        f"{param} is too large: {size} is more than {limits.picture_pixels / 1e6:.0f} megapixels; "
        "send it smaller"
    )


def _video(data: bytes, param: str, limits: Limits) -> tuple[str, str] | None:
    """Ending and size of a video, by its header; None if it is not a video."""
    import av

    from everyframe.media.limits import open_video

    if len(data) > limits.video_bytes:
        raise ApiError(
            "too_large",
            f"{param} is larger than {format_bytes(limits.video_bytes)}; cut it",
            param,
        )
    try:
        with open_video(io.BytesIO(data), limits.picture_pixels) as container:
            kinds = container.format.name.split(",")
            ending = next((_VIDEOS[kind] for kind in kinds if kind in _VIDEOS), None)
            streams = container.streams.video
            if ending is None or not streams or streams[0].codec_context is None:
                return None
            width, height = streams[0].width, streams[0].height
            seconds = (container.duration or 0) / 1_000_000
    except (av.FFmpegError, MediaError, ValueError, OSError):
        return None
    if seconds > limits.video_seconds:
        raise ApiError(
            "too_large",
            f"{param} lasts {seconds:.0f} seconds, at most {limits.video_seconds:.0f} are read; "
            "cut it",
            param,
        )
    if not width:
        raise ApiError(
            "invalid_value",
            f"{param} has no frame that can be read: it is damaged, or larger than "
            f"{limits.picture_pixels / 1e6:g} megapixels",
            param,
        )
    if width * height > limits.picture_pixels:
        raise ApiError("too_large", _too_many_pixels(param, limits, f"{width}x{height}"), param)
    return ending, f"{width}x{height}"
