"""What the options of inpainting name, by their words alone: files, boxes, what is made here.

Loads nothing and opens no file, so that what is not there is told before a worker starts. Read
next: `inputs.py`, which opens them.
"""

from __future__ import annotations

import os
import re
from typing import Any

from everyframe.core.errors import MediaError

#: What can be made of the source itself for a ControlNet to see.
BUILT_IN = ("canny", "inpaint")

_BOX = re.compile(r"\s*-?[\d.]+\s*(,\s*-?[\d.]+\s*)+")

_FILES = "; give a picture, a folder, a video, or"


def is_box(given: Any) -> bool:
    """Whether a mask is numbers with commas, and no file that is called so."""
    return isinstance(given, str) and not _is_there(given) and _BOX.fullmatch(given) is not None


def is_built_in(given: Any) -> bool:
    """Whether a control is made of the source."""
    return isinstance(given, str) and given.casefold() in BUILT_IN


def several(given: Any) -> list[Any]:
    """One control for each ControlNet: a list, or with commas unless a file is called so."""
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, str) and "," in given and not _is_there(given):
        return [part.strip() for part in given.split(",")]
    return [given]


def check_there(source: Any, mask: Any, control: Any) -> None:
    """Raise `MediaError` for a file or folder of these that does not exist."""
    _check("source", source, "")
    if not is_box(mask):
        _check("mask", mask, f"{_FILES} a box LEFT,TOP,RIGHT,BOTTOM")
    for each in several(control):
        if not is_built_in(each):
            others = " or ".join(BUILT_IN)
            _check("control", each, f"{_FILES} {others}, which are made of the source")


def _check(what: str, given: Any, instead: str) -> None:
    if isinstance(given, (str, os.PathLike)) and not _is_there(given):
        raise MediaError(f"{what}: {os.fspath(given)!r} does not exist{instead}")


def _is_there(given: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.expanduser(given))
