"""Files that are there whole or not at all, whatever stops the process or the machine meanwhile.

Bytes go to another name first and to the disk, then the name is changed, which no file system does
by halves. Read next: `store.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

#: What a file is called until it is whole.
UNFINISHED = ".unfinished"


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
