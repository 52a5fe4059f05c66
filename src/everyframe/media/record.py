"""Provenance record: what made a video, embedded in the file and beside it as a JSON sidecar.

A record is a plain JSON mapping whose content the engine decides. This module adds the keys
``schema``, ``fps`` and ``num_frames``, and knows where each format stores text: the comment of an
mp4 or gif, the EXIF user comment of a webp, a text chunk of a png. The sidecar is ``clip.json``
(``record.json`` in a folder of frames).

If the two disagree, the embedded record wins: it can't be separated from its frames, while a
sidecar can be edited, left behind, or shared by ``clip.mp4`` and ``clip.gif``.
"""

from __future__ import annotations

import json
import math
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
from everyframe.media.output_path import FOLDER_RECORD, RECORD_SCHEMA, RECORD_SCHEMA_1, PathLike

#: Fields of a plan, of its components and of their precision: name in schema 1 -> name.
_PLAN_FIELDS = {"clashes": "dtype_errors", "division": "parallel"}
_COMPONENT_FIELDS = {
    "offload": "block_offload", "streams": "from_disk", "by_turns": "model_offload",
    "holders": "num_weight_shards", "remedies": "repairs", "paths": "fast_paths",
}  # fmt: skip
_PRECISION_FIELDS = {"weights": "weight_dtype"}

PNG_KEY = "everyframe"

_EXIF_IFD = 0x8769
_USER_COMMENT = 0x9286
# EXIF: eight bytes that name the character set come before the text.
_ASCII_MARK = b"ASCII\x00\x00\x00"


def complete(record: Mapping[str, Any] | None, fps: Fraction, num_frames: int) -> dict[str, Any]:
    """Return `record` with ``schema``, ``fps`` (``"24"``, ``"24000/1001"``) and ``num_frames``.

    These three hold what the file may not: a folder of pictures has no frame rate, a webp merges
    equal frames and loses their duration, and ``schema`` tells our JSON from another program's.
    """
    ours = {"schema": RECORD_SCHEMA, "fps": str(fps), "num_frames": num_frames}
    return {**ours, **(record or {}), **ours}


def compact(record: Mapping[str, Any]) -> str:
    """Serialise `record` as one line of ASCII JSON, which every container carries unchanged."""
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def readable(record: Mapping[str, Any]) -> bytes:
    """Serialise `record` as indented UTF-8 JSON for the sidecar."""
    text = json.dumps(record, allow_nan=False, ensure_ascii=False, indent=2) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, out of a broken command line
        return (json.dumps(record, allow_nan=False, indent=2) + "\n").encode("ascii")


def exif_of(text: str) -> bytes:
    """Build an EXIF block whose user comment is `text`, for webp."""
    from PIL import Image

    exif = Image.Exif()
    exif[_EXIF_IFD] = {_USER_COMMENT: _ASCII_MARK + text.encode("ascii")}
    return exif.tobytes()


def parse(text: str | bytes | None) -> dict[str, Any] | None:
    """Parse `text` as a record. None if it is not an Everyframe record."""
    if not text or len(text) > MOST_RECORD_BYTES:
        return None
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not str(value.get("schema", "")).startswith("everyframe."):
        return None
    return with_current_fields(value)


def _finite(text: str) -> float:
    """The number, if finite: records contain no infinity or NaN, which JSON lacks."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def with_current_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record in the current schema; in schema 1, fields of the plan had other names."""
    plan = record.get("plan")
    if record.get("schema") != RECORD_SCHEMA_1 or not isinstance(plan, Mapping):
        return dict(record)
    plan = _rename(plan, _PLAN_FIELDS)
    if isinstance(components := plan.get("components"), (list, tuple)):
        plan["components"] = [_current_component(each) for each in components]
    return {**record, "schema": RECORD_SCHEMA, "plan": plan}


def _current_component(component: Any) -> Any:
    if not isinstance(component, Mapping):
        return component
    renamed = _rename(component, _COMPONENT_FIELDS)
    if isinstance(precision := renamed.get("precision"), Mapping):
        renamed["precision"] = _rename(precision, _PRECISION_FIELDS)
    return renamed


def _rename(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """Read a record from a JSON file. None if the file is missing or not an Everyframe record."""
    if not path.is_file() or path.stat().st_size > MOST_RECORD_BYTES:
        return None
    return parse(path.read_bytes())


def read_record(path: PathLike) -> dict[str, Any]:
    """Read the record of a video or folder of frames, or a sidecar given by its own name.

    A video's embedded record comes first, then its sidecar. Raises `MediaError` if the file does
    not exist or neither holds an Everyframe record.
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
    """Read the record inside a video or picture file. None if it has none.

    Raises `MediaError` if the file can be opened neither as a picture nor as a video.
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
    """Read the record of an open Pillow image (gif, webp or png). None if it has none."""
    # A png has it in a text chunk; searching further would read all pixels.
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
