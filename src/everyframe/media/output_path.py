"""Where a video goes: what kind of file a path means, whether it can be written, default names.

Everything here is checked *before* a run begins, so that an hour of work never ends in a typing
error. It opens no file but an existing sidecar, and loads neither numpy nor FFmpeg.

An existing file is replaced, in one step and only after the new one is complete: a run that fails
leaves the old one as it was. What nobody can have meant to lose (a folder with other things than
frames in it, a JSON file of somebody else in the sidecar's place) is refused.
Read next: `everyframe.media.write`.
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

RECORD_SCHEMA = "everyframe.record/1"
FOLDER_RECORD = "record.json"
FRAME_NAME = re.compile(r"frame_(\d{5,})\.png")

_MAX_FPS = 1000
# Browsers play gif frames shorter than 2/100 s five times too slowly; webp counts milliseconds.
_MAX_FPS_GIF = 50
_MAX_SIDE_WEBP = 16383
_MAX_SLUG = 60


class OutputFormat(Enum):
    """The kinds of output, by their ending; `FRAMES` is a folder of png files."""

    MP4 = ".mp4"
    GIF = ".gif"
    WEBP = ".webp"
    PNG = ".png"
    FRAMES = "/"


_ALLOWED = ".mp4, .gif, .webp, .png (one frame), or a folder: no ending, or '/' at the end"


def kind_of(path: PathLike) -> OutputFormat:
    """What `path` means as an output. Raises `MediaError` for an ending that we do not write."""
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
    """A frame rate as an exact fraction, such as ``24000/1001``.

    A float means the nearest fraction with a denominator of at most 1001, which covers the
    broadcast rates. Raises `InputError` unless 0 < fps <= 1000.
    """
    try:
        if isinstance(fps, float) and not math.isfinite(fps):
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
    """Where the record of `path` lies beside it: ``clip.json`` for ``clip.mp4``.

    For a folder of frames it is ``record.json`` inside.
    """
    place = Path(path)
    if kind_of(path) is OutputFormat.FRAMES:
        return place / FOLDER_RECORD
    return place.with_suffix(".json")


def numbered(path: PathLike, number: int) -> str:
    """`path` for one video of several: ``clip-7.mp4`` for ``clip.mp4``, ``clip-7/`` for ``clip/``.

    Let `number` be the seed, so that a name stays right however many videos are asked for.
    """
    text = os.fspath(path)
    if kind_of(path) is OutputFormat.FRAMES:
        bare = text.rstrip("/" + os.sep)
        return f"{bare}-{number}{text[len(bare) :]}"
    stem, ending = os.path.splitext(text)
    return f"{stem}-{number}{ending}"


def is_our_record(path: Path) -> bool:
    """Whether the file holds a record that Everyframe wrote."""
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
    """Make sure, before anything is computed, that a video of this size can be written to `path`.

    What is None is not checked. Sizes are in pixels. Creates nothing. Raises `MediaError` with one
    line for a parent folder that is missing or can't be written, an unknown ending, a size, length
    or frame rate that the kind of file can't have, or something that must not be replaced; and
    `InputError` for a frame rate that no file can have.
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
    """Raise `MediaError` if the folder that one is in, where files without a name go, is closed."""
    if not os.access(".", os.W_OK | os.X_OK):
        raise MediaError("no permission to write in the folder you are in; name an output")


def check_folder(folder: PathLike) -> Path:
    """The place of the report. Raises `InputError` where there can be no such folder."""
    path = Path(check_path(folder, "report"))
    for place in (path, *path.parents):
        if place.is_dir():
            return path
        if place.exists():
            raise InputError(f"report must be a folder, and {os.fspath(place)!r} is none")
    return path


def _check_place(path: PathLike, kind: OutputFormat) -> None:
    text = os.fspath(path)
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
    """Whether a frames folder may hold `entry`, so that it goes when the folder is replaced."""
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
    """The even sizes next to `side`, smaller and larger; `side` twice if it is even."""
    return max(2, side - side % 2), side + side % 2


def slug(text: str, limit: int = _MAX_SLUG) -> str:
    """`text` as lower-case ASCII words joined by ``-``, at most `limit` long, cut between words."""
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
    """The next free name ``{date}-{time}_{model}_{prompt's words}_{seed}.mp4`` in `folder`.

    Free means that neither the video nor its sidecar exists; else ``-2``, ``-3``, … is appended.
    Nothing is created or reserved.
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
