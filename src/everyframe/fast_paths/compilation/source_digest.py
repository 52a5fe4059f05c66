"""Digests of descriptions and of source files, by which packages of compiled code are found."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any


def source_files(cls: type) -> set[str]:
    """Source files of a class and its bases, without torch's."""
    names = {each.__module__ for each in cls.__mro__ if not each.__module__.startswith("torch.")}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return {str(file) for file in files if file}


def digest(value: Any) -> str:
    """Hash of a description, 24 hexadecimal digits."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, changed: int, size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:24]


def source_digest(files: set[str]) -> str:
    """Digest of source files by their content; files that are not there count by name."""
    found = []
    for path in files:
        try:
            facts = Path(path).stat()
        except OSError:
            found.append(Path(path).name)  # code that was typed in
            continue
        found.append(_file_digest(path, facts.st_mtime_ns, facts.st_size))
    return digest(sorted(found))
