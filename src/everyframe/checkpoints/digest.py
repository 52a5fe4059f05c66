"""Checkpoint hash for the provenance record: sha256, cached between runs.

Hashing 19 GB takes a minute, which planning cannot afford. The sha256 of a file is cached in
`folder.cache_folder` by path, size, modification time, inode change time and inode. Resetting the
modification time of a changed file updates the inode's change time, which no program can set back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from everyframe.checkpoints.folder import cache_folder, check_plain, warn_unusable_cache
from everyframe.core.errors import CheckpointError
from everyframe.core.paths import replace_file

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 22
_FILE = "digests.json"


def digest(files: Sequence[str | Path]) -> str:
    """sha256 in hex of one file; for several files, the sha256 of their sha256s in the given order.

    Paths do not enter, so the same weights have the same digest at any location.

    Raises:
        CheckpointError: a file cannot be read.
        ValueError: `files` is empty.
    """
    if not files:
        raise ValueError("digest needs at least one file")
    return _together([file_digest(path) for path in files])


def known_digest(files: Sequence[str | Path]) -> str | None:
    """Cached digest of these files; None if one was never hashed or has changed. Reads no file."""
    table = _load_cache()
    each = [_find_cached(Path(path), table) for path in files]
    known = [value for value in each if value is not None]
    return _together(known) if files and len(known) == len(each) else None


def _find_cached(path: Path, table: Mapping[str, object]) -> str | None:
    """Cached sha256 of a file that has not changed since."""
    try:
        real = path.resolve(strict=True)
        stat = real.stat()
    except OSError:
        return None
    known = table.get(str(real))
    if isinstance(known, list) and len(known) == 5 and known[:4] == _file_status(stat):
        return str(known[4])
    return None


def file_state(path: Path) -> tuple[int, ...]:
    """Status of a file that is unchanged while its bytes are, like the digest's."""
    return tuple(_file_status(path.stat()))


def file_states(paths: Iterable[Path]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and `file_state` of those that are files, in the order of their names."""
    return tuple((str(path), file_state(path)) for path in sorted({*paths}) if path.is_file())


def _file_status(stat: os.stat_result) -> list[int]:
    """File status that must be unchanged for the bytes to count as unchanged."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _together(each: Sequence[str]) -> str:
    if len(each) == 1:
        return each[0]
    return hashlib.sha256("\n".join(each).encode("ascii")).hexdigest()


def file_digest(path: str | Path) -> str:
    """sha256 in hex of one file, from the cache if the file has not changed."""
    path = Path(path)
    known = _find_cached(path, _load_cache())
    if known is not None:
        return known
    try:
        real = path.resolve(strict=True)
        check_plain(real)
        key = _file_status(real.stat())
        hasher = hashlib.sha256()
        with real.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    value = hasher.hexdigest()
    _remember(str(real), [*key, value])
    return value


def _load_cache() -> dict[str, object]:
    """Cached hashes of earlier runs; empty if the cache is absent or broken."""
    try:
        table = json.loads((cache_folder() / _FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        warn_unusable_cache(error)
        return {}
    except ValueError as error:
        _log.warning("%s can't be used, hashing again: %s", cache_folder() / _FILE, error)
        return {}
    return table if isinstance(table, dict) else {}


def _remember(path: str, entry: list[object]) -> None:
    try:
        replace_file(cache_folder() / _FILE, json.dumps({**_load_cache(), path: entry}))
    except OSError as error:
        warn_unusable_cache(error)
