"""The home folder, and paths that begin with ``~``. Some accounts, in containers, have none."""

from __future__ import annotations

import os
from pathlib import Path

from everyframe.core.errors import InputError


def home_folder() -> Path:
    """Where the person's own files lie.

    Raises:
        InputError: the system knows none; says what to set.
    """
    found = os.path.expanduser("~")
    if found == "~":
        raise InputError(
            "this account has no home folder; set HOME, or EVERYFRAME_CACHE and EVERYFRAME_RUNS"
        )
    return Path(found)


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` resolved; as it is where nobody is called so."""
    return Path(os.path.expanduser(os.fspath(path)))
