"""Tell whether a run folder is this user's own: a signature of its constant data, and no links.

The key is 32 random bytes in the user's state folder, readable by nobody else. It is created with
the first run and never replaced. Without a key that can be read, runs are unsigned: nobody's own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, InputError
from everyframe.core.paths import state_folder

#: Key of the signature in the data that it signs.
SIGNATURE = "signature"
_NUM_BYTES = 32


def key_file() -> Path:
    """File of this user's key. Raises `InputError` without a home folder."""
    return state_folder() / "run-key"


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with this user's signature, or with none if there can be no key."""
    key = _read_key() or _new_key()
    plain = {name: value for name, value in values.items() if name != SIGNATURE}
    return plain | ({} if key is None else {SIGNATURE: _signature(plain, key)})


def is_signed(values: Mapping[str, Any]) -> bool:
    """Whether this user's key signed exactly these values."""
    key, found = _read_key(), values.get(SIGNATURE)
    if key is None or not isinstance(found, str):
        return False
    plain = {name: value for name, value in values.items() if name != SIGNATURE}
    # Text of a file may hold lone surrogates.
    theirs = found.encode(errors="surrogatepass")
    return hmac.compare_digest(_signature(plain, key).encode(), theirs)


def _signature(values: Mapping[str, Any], key: bytes) -> str:
    # As it comes out of its file: tuples are lists there, and keys are text.
    text = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """This user's key; None if it is missing, of another size, or another user's to read."""
    try:
        # A link would lead to a file that somebody else may know.
        with open(key_file(), "rb", opener=_open_no_link) as file:
            facts = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(facts.st_mode)
            if os.name == "posix":
                is_ours &= facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
            key = file.read(_NUM_BYTES + 1) if is_ours else b""
    except (OSError, InputError):
        return None
    return key if len(key) == _NUM_BYTES else None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _new_key() -> bytes | None:
    """Create the key, whole at once; that of another process which was faster. None without."""
    try:
        place = key_file()
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_NUM_BYTES))
                file.flush()
                os.fsync(file.fileno())
            os.link(unfinished, place)
        finally:
            unfinished.unlink()
    except FileExistsError:
        return _read_key()
    except (OSError, InputError):
        return None
    return _read_key()


def check_files(folder: Path) -> None:
    """Raise `CorruptRunError` for anything in a run folder that is no plain file or folder.

    A link would lead what is read, written or swept out of the folder.
    """
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CorruptRunError(
                    f"{path} is a link or no plain file, and a run has none: this folder is not as "
                    "everyframe wrote it"
                )
