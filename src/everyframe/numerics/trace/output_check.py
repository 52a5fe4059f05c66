"""Check that a trace can be written to a path, before anything is computed. Imports no torch."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from everyframe.core.errors import InputError
from everyframe.core.paths import check_path

#: Files that every trace contains.
HEADER, TABLES = "trace.json", "tables.safetensors"


def check_place(path: str | os.PathLike[str]) -> Path:
    """Check the path of a new trace. Raises `InputError` for a folder or another program's file."""
    place = Path(check_path(path, "the trace"))
    if place.is_dir() or not place.name:
        raise InputError(f"{str(path)!r} is a folder; name a file for the trace, such as a.trace")
    if not place.parent.is_dir():
        raise InputError(f"there is no folder {str(place.parent)!r} for {place.name!r}")
    if not os.access(place.parent, os.W_OK):
        raise InputError(f"the folder {str(place.parent)!r} can't be written to")
    if place.exists() and place.stat().st_size and not _is_ours(place):
        raise InputError(f"{str(path)!r} is there already and is no trace; name another file")
    return place


def _is_ours(place: Path) -> bool:
    try:
        with zipfile.ZipFile(place) as file:
            return {HEADER, TABLES} <= set(file.namelist())
    except (zipfile.BadZipFile, OSError):
        return False
