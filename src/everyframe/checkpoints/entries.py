"""One tensor's place in a file, and reading it from there.

Files are read and not mapped: pages of a mapped file count as memory of the process, so that
filling a module from one would look twice as large as it is, and a file that is cut short while
it is mapped kills the process. Read next: `tensors`, which finds the places.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from everyframe.checkpoints.reading import reading
from everyframe.core.errors import CannotRunError, CheckpointError


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `num_bytes` from byte `offset` of `path` on, little-endian.

    `stride` is in elements, None for a contiguous tensor. `resident` is set instead of a place
    for the old pickle format, which can only be read whole.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    stride: tuple[int, ...] | None = None
    resident: torch.Tensor | None = None


def read_entry(entry: Entry, name: str) -> torch.Tensor:
    """The tensor that lies there, in memory that nobody else holds.

    Raises:
        CheckpointError: the file can't be read or ends too early; `name` is for that text.
    """
    if entry.resident is not None:
        return entry.resident.clone()
    if sys.byteorder != "little":
        raise CannotRunError("checkpoints are little-endian and this machine is not")
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    view = raw.numpy().data
    done = 0
    try:
        with reading(), entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while done < entry.num_bytes:
                got = file.readinto(view[done:])
                if not got:
                    break
                done += got
    except OSError as error:
        raise CheckpointError(f"{entry.path} can't be read: {error.strerror or error}") from error
    if done < entry.num_bytes:
        raise CheckpointError(f"{entry.path} ended within tensor {name!r}; it is truncated")
    flat = raw.view(entry.dtype)
    if entry.stride is None:
        return flat.reshape(entry.shape)
    return flat.as_strided(entry.shape, entry.stride).contiguous()
