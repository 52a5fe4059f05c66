"""Cache of decoded input files and folders, which plan, dry runs and run all read.

It holds at most 128 MiB of frames, the most recently used; larger input is decoded again. A file
that has changed is decoded again too.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Lock

import numpy as np

from everyframe.media.pixels import Frames

_MOST_BYTES = 128 << 20

_frames: OrderedDict[Hashable, Frames] = OrderedDict()
_lock = Lock()


def decode_once(path: str | os.PathLike[str], how: str, decode: Callable[[], Frames]) -> Frames:
    """Frames of a file: a copy of the cached result of ``decode()``, else its new result.

    `how` distinguishes several ways to decode one file.
    """
    key = _key(path, how)
    with _lock:
        found = _frames.get(key)
        if found is not None:
            _frames.move_to_end(key)
    if found is not None:
        return np.array(found)
    frames = decode()
    _keep(key, frames)
    return frames


def shape_of(
    path: str | os.PathLike[str], how: str, decode: Callable[[], Iterable[Frames]]
) -> tuple[int, int, int]:
    """(T, H, W) of a video whose frames ``decode()`` yields; few frames are cached, many are not.

    `path` and `how` are as in `decode_once`.
    """
    key = _key(path, how)
    with _lock:
        found = _frames.get(key)
    if found is not None:
        return found.shape[0], found.shape[1], found.shape[2]
    decoded: list[Frames] = []
    count, height, width = 0, 0, 0
    for frame in decode():
        count, (height, width) = count + 1, frame.shape[:2]
        if count * frame.nbytes > _MOST_BYTES:
            decoded.clear()
        else:
            decoded.append(frame)
    if len(decoded) == count:
        _keep(key, np.stack(decoded))
    return count, height, width


def _key(path: str | os.PathLike[str], how: str) -> Hashable:
    """Identity of the content of a file or folder; None if it can't be read."""
    try:
        files = sorted(os.scandir(path), key=lambda each: each.name) if os.path.isdir(path) else []
        seen = [(each.path, each.stat()) for each in files] or [(os.fspath(path), os.stat(path))]
    except (OSError, ValueError):
        return None  # decoding says what is wrong with it
    # A copy can have the old mtime, but not the old ctime.
    marks = ((name, at.st_ino, at.st_mtime_ns, at.st_ctime_ns, at.st_size) for name, at in seen)
    return how, os.path.realpath(path), *marks


def _keep(key: Hashable, frames: Frames) -> None:
    if key is None or frames.nbytes > _MOST_BYTES:
        return
    with _lock:
        _frames[key] = frames.copy()  # the caller may write to the others
        while sum(each.nbytes for each in _frames.values()) > _MOST_BYTES:
            _frames.popitem(last=False)
