"""Write files atomically, and JSON with a checksum.

Bytes go to a temporary name and are synced to disk. The file is then renamed, which every file
system does atomically, so a crash leaves the old file or the new one. JSON files contain a checksum
of their own bytes, so corruption is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError

#: Suffix of a file until it is complete.
UNFINISHED = ".unfinished"
#: Errors raised when values are built from corrupt data, or from another version's.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` with `data` atomically. Raises `OSError`; the old file then remains."""
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
    """Sync the names in a folder to disk, if the system supports that."""
    if os.name != "posix":
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def checksum(data: bytes) -> str:
    """Hash of bytes in hex, as used for all files of a run."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace `path` with `values`, at least one, and a checksum. Raises `OSError`."""
    rest = (json.dumps(values, indent=1)[1:] + "\n").encode()
    write_whole(path, _first_line(rest) + rest)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None if there is no such file.

    Raises:
        CorruptRunError: the content changed, even by one bit.
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
    """First line of a checksummed JSON file; the checksum covers everything after it."""
    return f'{{"checksum": "{checksum(rest)}",'.encode()
