"""Files that are there whole or not at all, whatever stops the process or the machine meanwhile.

Bytes go to another name first and to the disk, then the name is changed, which no file system does
by halves. JSON carries a checksum of its own bytes, so that a changed one is seen. Read next:
`tensor_store.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError

#: What a file is called until it is whole.
UNFINISHED = ".unfinished"
#: What comes of making values out of data that was changed, or is another version's.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`. Raises `OSError`; then what was there before still is."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can tell."""
    if os.name != "posix":
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def checksum(data: bytes) -> str:
    """The hash by which a run's files are known, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Put `values`, at least one, in the place of `path`, with a checksum. Raises `OSError`."""
    rest = (json.dumps(values, indent=1)[1:] + "\n").encode()
    write_whole(path, _first_line(rest) + rest)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None where there is no such file.

    Raises:
        DamagedError: it is not as it was written, be it by a single bit.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptRunError(f"{path} can't be read: {error}") from error
    rest = data[len(_first_line(b"")) :]
    if not data.startswith(_first_line(rest)):
        raise CorruptRunError(
            f"{path} is not as this version of everyframe wrote it: it was changed since, or is "
            "another version's"
        )
    values: dict[str, Any] = json.loads(b"{" + rest)
    return values


def _first_line(rest: bytes) -> bytes:
    """The first line of a JSON file with a checksum, which is of all that follows."""
    return f'{{"checksum": "{checksum(rest)}",'.encode()
