"""A secret key in a file of this user: 32 random bytes that nobody else can read.

It is created when it is first needed and never replaced.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from everyframe.core.paths import open_no_link

_NUM_BYTES = 32


def read_key(path: Path) -> bytes | None:
    """The key; None if it is missing, of another size, a link, or another user's to read."""
    try:
        # A link would lead to a file that somebody else may know.
        with open(path, "rb", opener=open_no_link) as file:
            facts = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(facts.st_mode)
            if os.name == "posix":
                is_ours &= facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
            key = file.read(_NUM_BYTES + 1) if is_ours else b""
    except OSError:
        return None
    return key if len(key) == _NUM_BYTES else None


def read_or_create_key(path: Path) -> bytes | None:
    """The key, created if there is none, whole at once; None where that is not possible.

    Processes that create it at once have the same.
    """
    key = read_key(path)
    if key is not None:
        return key
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_NUM_BYTES))
                file.flush()
                os.fsync(file.fileno())
            os.link(unfinished, path)
        finally:
            unfinished.unlink()
    except FileExistsError:
        return read_key(path)  # another process was faster
    except OSError:
        return None
    return read_key(path)
