"""Paths: validate what users supply before any library sees it; replace a file atomically.

A value that cannot be a path is wrong input and gives a one-line error: a type other than text or
path, a NUL, a name longer than the system allows, ``~`` of an unknown user.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.options import shown

#: Error codes of the system for names that no file can have.
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ)

#: Error codes of the system for a full disk or quota.
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk or quota caused the error, also through one that explains it."""
    while error is not None:
        if getattr(error, "errno", None) in _DISK_FULL:
            return True
        error = error.__cause__
    return False


def check_path(given: Any, what: str = "a path") -> str:
    """Text of a valid path; `what` is the option that holds it.

    Raises:
        InputError: no file can have this name.
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
    """The path with ``~`` replaced by the home folder.

    Raises:
        InputError: no file can have this name, or the user after ``~`` is unknown.
    """
    text = check_path(given, what)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(
            f"{what} {shown(text)} is in the home folder of a user who is not there; "
            "write out the folder"
        ) from None


def split_paths(text: str, place: Path | None = None) -> list[str]:
    """Split names of files at commas, unless something has that whole name, seen from `place`."""
    whole = os.path.join(place or "", os.path.expanduser(text))
    return [text] if os.path.exists(whole) else text.split(",")


def state_folder() -> Path:
    """Everyframe's folder in the state folder: ``XDG_STATE_HOME``, else ``~/.local/state``.

    Raises:
        InputError: there is no home folder.
    """
    return xdg_folder("XDG_STATE_HOME", ".local/state")


def config_folder() -> Path:
    """Everyframe's folder of configuration: in ``XDG_CONFIG_HOME``, else in ``~/.config``.

    Raises:
        InputError: there is no home folder.
    """
    return xdg_folder("XDG_CONFIG_HOME", ".config")


def xdg_folder(variable: str, default: str) -> Path:
    """Everyframe's folder in the one that `variable` names, else in `default` of the home folder.

    A relative path is ignored, as the XDG Base Directory Specification says.

    Raises:
        InputError: there is no home folder.
    """
    shared = os.environ.get(variable)
    folder = expand_path(shared, variable) if shared else None
    if folder is None or not folder.is_absolute():
        folder = home_folder() / default
    return folder / "everyframe"


def home_folder() -> Path:
    """Home folder of the current user.

    Raises:
        InputError: there is none, as in a container that does not know the user.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise InputError(
            "this user has no home folder; set HOME, or EVERYFRAME_CACHE and EVERYFRAME_RUNS, to a "
            "folder that can be written"
        ) from None


def facts_in(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each file and folder in a folder, and the folder itself, with its facts.

    Links are not followed. What another process removes meanwhile is left out.
    """
    for each in (path, *(() if path.is_symlink() else _inside(path))):
        with suppress(FileNotFoundError):
            yield each, each.lstat()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; see `facts_in`."""
    return sum(each.st_size for _, each in facts_in(path) if not stat.S_ISDIR(each.st_mode))


def _inside(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def open_no_link(path: str, flags: int) -> int:
    """Opener for `open` that follows no link and does not wait for a pipe's other side."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def replace_file(path: Path, data: bytes | str, *, is_durable: bool = False) -> None:
    """Replace a file atomically: write a new one beside it, then rename it.

    A crash leaves the old file or the new one. Several processes may write at once; the last one
    wins. Missing folders are created. `is_durable` syncs data and name to disk, so that a power cut
    loses neither; the folder must be there then.

    Raises:
        OSError: the file can't be written; the old one remains.
    """
    if not is_durable:
        path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{path.name}.{os.getpid()}.{threading.get_ident()}.unfinished"
    unfinished = path.with_name(name)
    try:
        with unfinished.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if is_durable and os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
