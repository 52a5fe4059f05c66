"""Verify downloaded files against the digests that the hub's cache names them by. No network.

A snapshot in the cache is made of links to ``blobs/DIGEST``: the sha256 of a large file, or git's
SHA-1 of a small one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from everyframe.checkpoints.digest import file_digest
from everyframe.core.errors import CheckpointError

_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def verify_file(path: Path) -> bool:
    """Whether the hub's cache names a digest for this file, which its bytes then have.

    Raises:
        CheckpointError: the bytes are others; the text names the file to remove.
    """
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return False
    if _SHA256.fullmatch(blob.name):
        found = file_digest(blob)
    elif _GIT.fullmatch(blob.name):
        found = _git_digest(blob)
    else:
        return False
    if found != blob.name:
        raise CheckpointError(
            f"{path} is damaged: its digest is {found[:12]}… and not {blob.name[:12]}…; remove "
            f"{blob} and pull again"
        )
    return True


def _git_digest(blob: Path) -> str:
    """Git's name for a file's content."""
    try:
        data = blob.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{blob} can't be read: {error.strerror or error}") from error
    head = f"blob {len(data)}\0".encode()
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()
