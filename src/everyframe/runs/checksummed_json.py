"""JSON files of a run: replaced atomically, with a checksum of their own bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError, first_line
from everyframe.core.paths import replace_file

#: Errors raised when values are built from corrupt data, or from another version's.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def checksum(data: bytes) -> str:
    """Hash of bytes in hex, as used for all files of a run."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace `path` with `values`, at least one, and a checksum. Raises `OSError`."""
    rest = (json.dumps(values, indent=1)[1:] + "\n").encode()
    replace_file(path, _first_line(rest) + rest, is_durable=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None if there is no such file.

    Raises:
        CorruptRunError: the content changed, even by one bit, or is another program's.
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
    try:
        values: dict[str, Any] = json.loads(b"{" + rest)
    except (ValueError, RecursionError) as error:
        raise CorruptRunError(f"{path} holds no JSON: {first_line(error)}") from error
    return values


def _first_line(rest: bytes) -> bytes:
    """First line of a checksummed JSON file; the checksum covers everything after it."""
    return f'{{"checksum": "{checksum(rest)}",'.encode()
