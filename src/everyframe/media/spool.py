"""Frames that wait on the disk until their file's turn comes: an encoder takes memory, they don't.

Not a format of ours: the file has no name, and is gone when it is closed or the process ends.
Read next: `everyframe.media.write`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from everyframe.core.errors import MediaError
from everyframe.media.paths import PathLike
from everyframe.media.pixels import Frames


class Spool:
    """Pieces of several videos, uint8 (t, H, W, 3), kept in one file beside where they will go."""

    def __init__(self, beside: PathLike) -> None:
        self._folder = Path(os.path.abspath(beside)).parent
        self._file: IO[bytes] | None = None
        self._pieces: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def put(self, key: int, piece: Frames) -> None:
        """Append a piece to the video of that key. Raises `MediaError` if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - see close
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(np.ascontiguousarray(piece).data)
            self._file.flush()
        except OSError as error:
            raise MediaError(
                f"frames that wait for their turn can't be kept in {str(self._folder)!r}: "
                f"{error.strerror or error}; free some space, or ask for fewer videos at once"
            ) from error
        self._pieces.setdefault(key, []).append((start, piece.shape))

    def take(self, key: int) -> Iterator[Frames]:
        """The pieces of that key in order, each once."""
        for start, shape in self._pieces.pop(key, ()):
            assert self._file is not None
            self._file.seek(start)
            data = self._file.read(int(np.prod(shape)))
            yield np.frombuffer(data, np.uint8).reshape(shape)

    def close(self) -> None:
        """Forget everything."""
        if self._file is not None:
            self._file.close()
        self._file, self._pieces = None, {}
