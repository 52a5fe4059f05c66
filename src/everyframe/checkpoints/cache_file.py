"""Disk cache for small results that can be recomputed: one JSON file each.

A file is complete or absent: it is written to a temporary file and renamed. It contains a digest of
its key and a digest of its text; a file that does not match counts as absent and is overwritten.
Several processes may write at once, and the last one wins. The content is plain data, which the
caller validates.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from everyframe.checkpoints.folder import cache_folder, package_folder
from everyframe.core.paths import replace_file

_log = logging.getLogger(__name__)
_SCHEMA = "everyframe.cache/1"

#: Larger files are neither read nor written. Beyond this number the oldest files of a kind are
#: deleted.
MAX_BYTES, MAX_FILES = 4 << 20, 1024

#: Packages whose code may produce a result, and prefixes of variables that affect them.
_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "sentencepiece", "ftfy")
_STEER = ("DIFFUSERS_", "TRANSFORMERS_", "TORCH", "PYTORCH_")


@dataclass(frozen=True)
class CacheFile:
    """Cache file of one result.

    `kind` is the folder, one per type of result. `key` contains everything that the result depends
    on beside the software. Of a kind `most` files are kept, `MAX_FILES` by default.
    """

    kind: str
    key: str
    most: int | None = None

    @property
    def path(self) -> Path:
        """Path of the file."""
        return cache_folder() / self.kind / f"{self._digest[:32]}.json"

    @property
    def _digest(self) -> str:
        text = "\n".join([_SCHEMA, self.kind, software_key(), self.key])
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self) -> Any:
        """Result as plain data; None if it is absent or does not match."""
        path = self.path
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                return None
            head, _, text = path.read_text(encoding="utf-8").partition("\n")
            saved = json.loads(head)
            if saved == self._head(text):
                return json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            _log.info("%s can't be read, so it is made again: %s", path, error)
            return None
        _log.info("%s is damaged, or of something else; it is made again", path)
        return None

    def write(self, value: Any) -> None:
        """Store the result if possible."""
        text = json.dumps(value)
        if len(text) > MAX_BYTES // 2:
            return
        try:
            replace_file(self.path, f"{json.dumps(self._head(text))}\n{text}")
            _remove_oldest(self.path.parent, self.most or MAX_FILES)
        except OSError as error:
            _log.info("%s can't be written, so it will be made again: %s", self.path, error)

    def remove(self) -> None:
        """Delete the result, so that it is computed again."""
        self.path.unlink(missing_ok=True)

    def _head(self, text: str) -> dict[str, str]:
        digest = hashlib.sha256(f"{self._digest}\n{text}".encode()).hexdigest()
        return {"schema": _SCHEMA, "of": self._digest, "sha256": digest}


def _remove_oldest(folder: Path, most: int) -> None:
    # A plan may write dozens of files: each write lists names only; times are read seldom, as
    # several files are removed at once.
    if len(os.listdir(folder)) <= most:
        return
    files = sorted((each.stat().st_mtime_ns, each.path) for each in os.scandir(folder))
    for _, path in files[: len(files) - most + most // 16]:
        Path(path).unlink(missing_ok=True)


@cache
def software_key() -> str:
    """Digest of the software: our own source, other packages, and variables that affect them.

    Files are identified by size and time, so an edited file counts as another version even if its
    version number is unchanged.
    """
    own = package_folder(".")
    files = [
        (path.relative_to(own).as_posix(), *_stamp(path)) for path in sorted(own.rglob("*.py"))
    ]
    others = [(name, _version(name), *_stamp_of(name)) for name in _PACKAGES]
    steer = sorted(item for item in os.environ.items() if item[0].startswith(_STEER))
    parts = [platform.python_version(), files, others, steer]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _stamp_of(package: str) -> tuple[int, ...]:
    """Size and time of a package's first file, which an installation rewrites; imports nothing."""
    spec = find_spec(package)
    return () if spec is None or spec.origin is None else _stamp(Path(spec.origin))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
