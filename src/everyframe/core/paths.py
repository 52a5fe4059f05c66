"""Paths as people give them, checked before a library of somebody else's meets them.

What no file can be called is wrong input and is said in one line: another type than text or a path,
a NUL, a name longer than the system takes, ``~`` of nobody. Nothing is opened or made here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.options import shown

#: What the system says of a name that no file can have.
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


def check_path(given: Any, what: str = "a path") -> str:
    """The text of a path that a file may have; `what` is the option that it was given to.

    Raises:
        InputError: nothing can be called so.
    """
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(text, str):
        raise InputError(f"{what} must be text or a path, got {shown(given)}")
    try:
        os.lstat(text)
    except ValueError:
        raise InputError(f"{what} holds a letter that no path can have: {shown(text)}") from None
    except OSError as error:
        if error.errno in _NO_NAME:
            raise InputError(f"{what} can't be {shown(text)}: {error.strerror}") from None
    return text


def expand_path(given: Any, what: str = "a path") -> Path:
    """The path, ``~`` replaced by the home folder.

    Raises:
        InputError: nothing can be called so, or it is in the home of nobody.
    """
    text = check_path(given, what)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(
            f"{what} {shown(text)} is in the home folder of a user who is not there; "
            "write out the folder"
        ) from None


def home_folder() -> Path:
    """The home folder of whoever runs this.

    Raises:
        InputError: there is none, as in a container for a user that it doesn't know.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise InputError(
            "this user has no home folder; set HOME, or EVERYFRAME_CACHE and EVERYFRAME_RUNS, to a "
            "folder that can be written"
        ) from None
