"""The record of what made a video: kept inside the file, and beside it.

A record is a plain mapping that JSON can hold; the engine decides what is in it. This module adds
three keys, ``schema``, ``fps`` and ``num_frames``, and knows where each kind of file has room for
text: the comment of an mp4 and of a gif, the EXIF user comment of a webp, a text chunk of a png.
The same record lies beside the file as ``clip.json`` (in a folder of frames as ``record.json``).

When the two disagree, the one inside the file is believed: it cannot be parted from its frames,
while a sidecar can be edited, left behind, or shared by a ``clip.mp4`` and a ``clip.gif``.
Read next: `everyframe.media.write`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from everyframe.core.errors import MediaError
from everyframe.core.paths import check_path
from everyframe.media.limits import (
    MOST_RECORD_BYTES,
    check_picture,
    open_picture,
    open_video,
)
from everyframe.media.output_path import FOLDER_RECORD, RECORD_SCHEMA, PathLike

PNG_KEY = "everyframe"

_EXIF_IFD = 0x8769
_USER_COMMENT = 0x9286
# EXIF: eight bytes that name the character set come before the text.
_ASCII_MARK = b"ASCII\x00\x00\x00"


def complete(record: Mapping[str, Any] | None, fps: Fraction, num_frames: int) -> dict[str, Any]:
    """`record` with ``schema``, ``fps`` (``"24"``, ``"24000/1001"``) and ``num_frames``.

    They say what the file cannot: a folder of pictures has no frame rate, a webp of equal frames
    keeps one of them and no duration, and another program's JSON must not be taken for ours.
    """
    ours = {"schema": RECORD_SCHEMA, "fps": str(fps), "num_frames": num_frames}
    return {**ours, **(record or {}), **ours}


def compact(record: Mapping[str, Any]) -> str:
    """`record` as one line of ASCII JSON, which every container carries unchanged."""
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def readable(record: Mapping[str, Any]) -> bytes:
    """`record` as indented UTF-8 JSON with its own letters, for the sidecar."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=False, indent=2) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, out of a broken command line
        return (json.dumps(record, allow_nan=False, indent=2) + "\n").encode("ascii")


def exif_of(text: str) -> bytes:
    """An EXIF block whose user comment is `text`, for webp."""
    from PIL import Image

    exif = Image.Exif()
    exif[_EXIF_IFD] = {_USER_COMMENT: _ASCII_MARK + text.encode("ascii")}
    return exif.tobytes()


def parse(text: str | bytes | None) -> dict[str, Any] | None:
    """The record in `text`, or None if it is no record of ours."""
    if not text or len(text) > MOST_RECORD_BYTES:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not str(value.get("schema", "")).startswith("everyframe."):
        return None
    return value


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """The record in a file of JSON; None if there is no such file, or it is no record of ours."""
    if not path.is_file() or path.stat().st_size > MOST_RECORD_BYTES:
        return None
    return parse(path.read_bytes())


def read_record(path: PathLike) -> dict[str, Any]:
    """The record of a video, of a folder of frames, or in a sidecar given by its own name.

    For a video: the one inside the file, else the sidecar. Raises `MediaError` if there is no such
    file, or neither holds a record of ours.
    """
    name = check_path(path)
    place = Path(name)
    if not place.exists():
        raise MediaError(f"no such file: {name!r}")
    if not (place.is_file() or place.is_dir()):  # a pipe may never end, nor begin
        raise MediaError(f"{name!r} is neither a file nor a folder of frames")
    if place.is_dir():
        sidecar = place / FOLDER_RECORD
    elif place.suffix.lower() == ".json":
        sidecar = place
    else:
        own = embedded_record(place)
        if own is not None:
            return own
        sidecar = place.with_suffix(".json")
    found = read_sidecar(sidecar)
    if found is None:
        places = (
            "it holds no"
            if sidecar == place or place.is_dir()
            else f"neither it nor {sidecar.name!r} holds a"
        )
        raise MediaError(f"{name!r} does not say what made it: {places} record of Everyframe")
    return found


def embedded_record(path: Path) -> dict[str, Any] | None:
    """The record inside a video or picture file, or None.

    Raises `MediaError` if the file is neither a picture nor a video that can be opened.
    """
    from PIL import UnidentifiedImageError

    try:
        with open_picture(path) as picture:
            check_picture(picture.width, picture.height, repr(str(path)))
            return record_of_picture(picture)
    except UnidentifiedImageError:
        return _record_of_video(path)
    except MediaError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        raise MediaError(f"can't read {str(path)!r}: {why}") from error


def record_of_picture(picture: Any) -> dict[str, Any] | None:
    """The record in an open Pillow image (gif, webp or png), or None."""
    # A png has it in a text; to look for more all of its pixels would be read.
    exif = {} if picture.format == "PNG" else picture.getexif().get_ifd(_EXIF_IFD)
    user_comment = exif.get(_USER_COMMENT, b"")
    if isinstance(user_comment, bytes) and user_comment.startswith(_ASCII_MARK):
        user_comment = user_comment[len(_ASCII_MARK) :]
    for text in (picture.info.get("comment"), picture.info.get(PNG_KEY), user_comment):
        record = parse(text) if isinstance(text, (str, bytes)) else None
        if record is not None:
            return record
    return None


def _record_of_video(path: Path) -> dict[str, Any] | None:
    import av

    try:
        with open_video(path) as container:
            tags = {key.lower(): value for key, value in container.metadata.items()}
    except (av.FFmpegError, OSError) as error:
        why = error.strerror or error
        raise MediaError(f"{str(path)!r} is neither a video nor a picture: {why}") from error
    return parse(tags.get("comment"))
