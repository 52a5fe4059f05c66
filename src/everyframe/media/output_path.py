"""Output paths: format by ending, checks before a run, default file names.

All checks run *before* a run begins, so a typing error never costs an hour of work. The module
opens no file but an existing sidecar, and loads neither numpy nor FFmpeg.

An existing output file is replaced atomically, only after the new one is complete; a failed run
leaves the old file unchanged. Two things are never replaced: a folder that holds anything but
frames, and a sidecar path that holds another program's JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from datetime import datetime
from enum import Enum
from fractions import Fraction
from pathlib import Path

from everyframe.core.errors import InputError, MediaError, did_you_mean
from everyframe.core.paths import check_path

PathLike = str | os.PathLike[str]

RECORD_SCHEMA = "everyframe.record/2"
#: Earlier schema, still read: fields of its plan have other names.
RECORD_SCHEMA_1 = "everyframe.record/1"
FOLDER_RECORD = "record.json"
FRAME_NAME = re.compile(r"frame_(\d{5,})\.png")

_MAX_FPS = 1000
# Browsers play gif frames shorter than 2/100 s five times too slowly; webp counts milliseconds.
_MAX_FPS_GIF = 50
_MAX_SIDE_WEBP = 16383
# What a record says may have any exponent, and a large one takes hours to be read exactly.
_SHORT_NUMBER = re.compile(r"[^eE]{1,64}([eE][+-]?\d{1,2})?")
_MAX_SLUG = 60


class OutputFormat(Enum):
    """Output formats by file ending; `FRAMES` is a folder of png files."""

    MP4 = ".mp4"
    GIF = ".gif"
    WEBP = ".webp"
    PNG = ".png"
    FRAMES = "/"


_ALLOWED = ".mp4, .gif, .webp, .png (one frame), or a folder: no ending, or '/' at the end"


def kind_of(path: PathLike) -> OutputFormat:
    """Output format of `path`. Raises `MediaError` for an unsupported ending."""
    text = check_path(path)
    ending = Path(text).suffix.lower()
    if text.endswith(("/", os.sep)) or not ending:
        return OutputFormat.FRAMES
    try:
        return OutputFormat(ending)
    except ValueError:
        known = [kind.value for kind in OutputFormat if kind is not OutputFormat.FRAMES]
        hint = did_you_mean(ending, known)
        raise MediaError(
            f"unknown ending {ending!r} of output {text!r}; allowed: {_ALLOWED}{hint}"
        ) from None


def exact_fps(fps: Fraction | float | str) -> Fraction:
    """Convert a frame rate to an exact fraction, such as ``24000/1001``.

    A float becomes the nearest fraction with a denominator of at most 1001, which covers the
    broadcast rates. Raises `InputError` unless 0 < fps <= 1000.
    """
    try:
        if isinstance(fps, float) and not math.isfinite(fps):
            raise ValueError
        if isinstance(fps, str) and not _SHORT_NUMBER.fullmatch(fps):
            raise ValueError
        exact = Fraction(fps)
    except (ValueError, TypeError, ZeroDivisionError):
        raise InputError(f"fps must be a number over 0 and at most 1000, got {fps!r}") from None
    if isinstance(fps, float):
        exact = exact.limit_denominator(1001)
    if not 0 < exact <= _MAX_FPS:
        raise InputError(f"fps must be a number over 0 and at most 1000, got {fps}")
    return exact


def sidecar_of(path: PathLike) -> Path:
    """Path of the sidecar record: ``clip.json`` for ``clip.mp4``, ``record.json`` in a folder."""
    place = Path(path)
    if kind_of(path) is OutputFormat.FRAMES:
        return place / FOLDER_RECORD
    return place.with_suffix(".json")


def number_path(path: PathLike, number: int) -> str:
    """Path of one of several videos: ``clip-7.mp4`` or ``clip-7/`` for ``clip.mp4`` or ``clip/``.

    Pass the seed as `number`, so that a name does not depend on the number of videos.
    """
    text = os.fspath(path)
    if kind_of(path) is OutputFormat.FRAMES:
        bare = text.rstrip("/" + os.sep)
        return f"{bare}-{number}{text[len(bare) :]}"
    stem, ending = os.path.splitext(text)
    return f"{stem}-{number}{ending}"


def is_our_record(path: Path) -> bool:
    """Whether the file holds a record written by Everyframe."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    schema = value.get("schema") if isinstance(value, dict) else None
    return isinstance(schema, str) and schema.startswith("everyframe.")


def check_output(
    path: PathLike,
    width: int | None = None,
    height: int | None = None,
    *,
    num_frames: int | None = None,
    fps: Fraction | float | str | None = None,
) -> OutputFormat:
    """Check before a run that a video of this size can be written to `path`; creates nothing.

    Values that are None are not checked. Sizes are in pixels.

    Raises:
        MediaError: parent folder missing or not writable, unknown ending, a size, length or frame
            rate that the format can't hold, or a target that must not be replaced.
        InputError: a frame rate that no format can hold, or a name that is too long.
    """
    kind = kind_of(path)
    _check_place(path, kind)
    if width is not None and height is not None:
        _check_size(path, kind, width, height)
    if kind is OutputFormat.PNG and num_frames is not None and num_frames != 1:
        raise MediaError(
            f"{os.fspath(path)!r} can hold one frame, and {num_frames} are to be written; "
            "end the name in '/' for a folder of png files, or in .mp4"
        )
    exact = None if fps is None else exact_fps(fps)
    if exact is not None and kind is OutputFormat.GIF and exact > _MAX_FPS_GIF:
        raise MediaError(
            f"a .gif plays at most {_MAX_FPS_GIF} frames a second, got {fps}; try .mp4"
        )
    return kind


def check_here() -> None:
    """Raise `MediaError` if the current folder, the default for outputs, is not writable."""
    if not os.access(".", os.W_OK | os.X_OK):
        raise MediaError("no permission to write in the folder you are in; name an output")


def check_folder(folder: PathLike) -> Path:
    """Check the path of a report folder. Raises `InputError` if no such folder can be created."""
    path = Path(check_path(folder, "report"))
    for place in (path, *path.parents):
        if place.is_dir():
            return path
        if place.exists():
            raise InputError(f"report must be a folder, and {os.fspath(place)!r} is none")
    return path


def _check_place(path: PathLike, kind: OutputFormat) -> None:
    text = os.fspath(path)
    if text == "-":
        raise MediaError("output '-': a video is not written to standard output; name a file")
    place = Path(os.path.realpath(text))  # what a link leads to is written, and the link stays
    parent = place.parent
    if not text or place == Path.cwd():
        raise MediaError(f"output {text!r} is the folder you are in; name a file or a new folder")
    if not parent.is_dir():
        what = "is a file" if parent.exists() else "does not exist"
        raise MediaError(
            f"the folder of output {text!r} {what}: {str(parent)!r}; make it first, "
            "or choose another output"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MediaError(f"no permission to write in {str(parent)!r}; choose another output")
    if kind is OutputFormat.FRAMES:
        _check_old_folder(text, place)
        return
    if place.is_dir():
        raise MediaError(f"output {text!r} is a folder; name a file in it, or another file")
    if place.exists() and not (place.is_file() and os.access(place, os.W_OK)):
        raise MediaError(f"output {text!r} exists and can't be replaced; choose another name")
    sidecar = place.with_name(sidecar_of(text).name)
    check_path(sidecar, f"the record of output {text!r}")  # a longer name than the video's
    if sidecar.exists() and not is_our_record(sidecar):
        raise MediaError(
            f"output {text!r} keeps its record in {sidecar.name!r}, and that file exists and was "
            "not written by Everyframe; choose another name"
        )


def _check_old_folder(text: str, place: Path) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise MediaError(
            f"output {text!r} means a folder of png files, and a file of that name exists; "
            "give it an ending such as .mp4, or choose another name"
        )
    others = [entry.name for entry in place.iterdir() if not is_of_frames(entry)]
    if others:
        raise MediaError(
            f"output folder {text!r} holds other things than frames, {min(others)!r} for one, and "
            "is not replaced; choose a new folder, or a file name in it"
        )


def is_of_frames(entry: Path) -> bool:
    """Whether `entry` belongs to a frames folder, and so is deleted when the folder is replaced."""
    return FRAME_NAME.fullmatch(entry.name) is not None or (
        entry.name == FOLDER_RECORD and is_our_record(entry)
    )


def _check_size(path: PathLike, kind: OutputFormat, width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"width and height must be at least 1 pixel, got {width}x{height}")
    if kind is OutputFormat.MP4 and (width % 2 or height % 2):
        widths, heights = _evens(width), _evens(height)
        sizes = dict.fromkeys(f"{w}x{h}" for w, h in zip(widths, heights, strict=True))
        raise MediaError(
            f"H.264 needs even sizes, got {width}x{height} for {os.fspath(path)!r}; "
            f"try {' or '.join(sizes)}, or the ending .webp, .gif or '/'"
        )
    if kind is OutputFormat.WEBP and max(width, height) > _MAX_SIDE_WEBP:
        raise MediaError(
            f"a .webp can be {_MAX_SIDE_WEBP} pixels a side, got {width}x{height}; try .mp4"
        )


def _evens(side: int) -> tuple[int, int]:
    """Even sizes next to `side`, smaller and larger; `side` twice if it is even."""
    return max(2, side - side % 2), side + side % 2


def slug(text: str, limit: int = _MAX_SLUG) -> str:
    """Convert `text` to lower-case ASCII words joined by ``-``.

    The result has at most `limit` characters and is cut between words.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    whole = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if len(whole) <= limit:
        return whole
    cut = whole[: limit + 1].rpartition("-")[0] or whole[:limit]
    return cut.strip("-")


def default_output(
    folder: PathLike,
    model: str,
    prompt: str,
    seed: int,
    *,
    ending: str = ".mp4",
    now: datetime | None = None,
) -> Path:
    """Next free path ``{date}-{time}_{model}_{prompt's words}_{seed}.mp4`` in `folder`.

    A path is free if neither the video nor its sidecar exists; otherwise ``-2``, ``-3``, … is
    appended. Nothing is created or reserved.
    """
    moment = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    # Of a hub id or a folder only the last part: names of people and places stay out of file names.
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    stem = f"{moment}_{slug(last, 40) or 'model'}_{slug(prompt) or 'video'}_{seed}"
    path = Path(folder) / f"{stem}{ending}"
    count = 1
    while path.exists() or sidecar_of(path).exists():
        count += 1
        path = Path(folder) / f"{stem}-{count}{ending}"
    return path
