"""Tell whether a run folder is this user's own: a signature of its constant data, and no links.

The key is a file in the user's state folder, created with the first run. Without a readable key,
runs are unsigned, and count as foreign.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, InputError
from everyframe.core.paths import state_folder
from everyframe.core.secret_key import read_key, read_or_create_key

#: Key of the signature in the data that it signs.
SIGNATURE = "signature"


def key_file() -> Path:
    """File of this user's key. Raises `InputError` without a home folder."""
    return state_folder() / "run-key"


def sign(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with this user's signature, or with none if there can be no key."""
    key = _key(read_or_create_key)
    plain = {name: value for name, value in values.items() if name != SIGNATURE}
    return plain | ({} if key is None else {SIGNATURE: _signature(plain, key)})


def is_signed(values: Mapping[str, Any]) -> bool:
    """Whether this user's key sign exactly these values."""
    key, found = _key(read_key), values.get(SIGNATURE)
    if key is None or not isinstance(found, str):
        return False
    plain = {name: value for name, value in values.items() if name != SIGNATURE}
    # Text from a file may hold lone surrogates.
    theirs = found.encode(errors="surrogatepass")
    return hmac.compare_digest(_signature(plain, key).encode(), theirs)


def _signature(values: Mapping[str, Any], key: bytes) -> str:
    # As read from its file, where tuples are lists and keys are text.
    text = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(read: Callable[[Path], bytes | None]) -> bytes | None:
    try:
        return read(key_file())
    except InputError:
        return None  # no home folder


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
