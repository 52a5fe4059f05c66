"""Safetensors headers: name, dtype, shape and position of each tensor, read without torch.

A safetensors file is eight bytes of little-endian header length, a JSON header, and the tensors'
bytes without gaps. The header is validated against the file's size before any tensor is read, so a
truncated or foreign file gives an error that names it.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from everyframe.core.errors import CheckpointError

# Bytes per element. Types below one byte (F4 and the like) are left out on purpose: torch has no
# plain tensors of them, so such a file is refused by the dtype's name.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_MAX_HEADER_BYTES = 100_000_000  # the limit that the format's own library sets
_MAX_DIMENSIONS = 64  # as many as torch's tensors can have
_MAX_SIDE = 2**63 - 1

_FOREIGN_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes; rename it to .pth if it is one"),
    (b"GGUF", "a GGUF file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"version https://git-lfs", "a git-lfs pointer; run `git lfs pull` to get the file itself"),
    (b"<!DOCTYPE", "a web page; the download went wrong"),
    (b"<html", "a web page; the download went wrong"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x89HDF", "an HDF5 file"),
)


@dataclass(frozen=True)
class TensorFact:
    """One tensor of a file: `dtype` in safetensors' spelling, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """All tensors of one file in file order, and its free-form metadata."""

    path: Path
    tensors: Mapping[str, TensorFact]
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_header(path: str | Path) -> SafetensorsHeader:
    """Read and validate the header of one safetensors file; reads no tensors.

    Raises:
        CheckpointError: no such file; not a safetensors; truncated; or an inconsistent header. The
            text names the file and the fault.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            header_bytes = int.from_bytes(start[:8], "little")
            _check_start(path, start, header_bytes, size)
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    return _parse_header(path, size, raw)


@lru_cache(maxsize=32)
def _parse_header(path: Path, size: int, raw: bytes) -> SafetensorsHeader:
    """Parse a header in a file of that size; cached, as a run reads it several times."""
    table = _parse(path, raw)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: its header's __metadata__ is not an object")
    data_start = 8 + len(raw)
    facts = sorted(
        (_fact(path, name, entry, data_start) for name, entry in table.items()),
        key=lambda fact: (fact.offset, fact.num_bytes),
    )
    _check_layout(path, facts, data_start, size)
    return SafetensorsHeader(
        path=path,
        tensors={fact.name: fact for fact in facts},
        metadata={str(key): str(value) for key, value in metadata.items()},
    )


def _check_start(path: Path, start: bytes, header_bytes: int, size: int) -> None:
    # Checked first: other formats' magic bytes look like a header length.
    if start[8:9] == b"{" and header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
        return
    for magic, what in _FOREIGN_STARTS:
        if start.startswith(magic):
            raise CheckpointError(f"{path} is not a safetensors file: it looks like {what}")
    if size < 10:
        raise CheckpointError(
            f"{path} is not a safetensors file or is truncated: it has {size} bytes; get it again"
        )
    if header_bytes > _MAX_HEADER_BYTES or start[8:9] != b"{":
        raise CheckpointError(
            f"{path} is not a safetensors file: it does not begin with a header length and JSON "
            f"(first bytes {start[:9]!r})"
        )
    raise CheckpointError(
        f"{path} is truncated: its header alone takes {8 + header_bytes:,} bytes, "
        f"{size:,} are on disk; get it again"
    )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path}: its safetensors header is broken: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: its safetensors header is not a JSON object")
    return table


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} is listed twice")
    return table


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fact(path: Path, name: str, entry: Any, data_start: int) -> TensorFact:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header entry {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, known are {', '.join(DTYPE_BYTES)}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(_is_count(size) and size <= _MAX_SIDE for size in shape)
    ):
        shown = repr(shape) if len(repr(shape)) < 100 else f"{repr(shape)[:100]}..."
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shown}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_count(offset) for offset in offsets)
    ):
        raise CheckpointError(f"{path}: tensor {name!r} has data_offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {tuple(shape)} and dtype {dtype} needs {needed:,} "
            f"bytes, its data_offsets {begin} to {end} hold {end - begin:,}"
        )
    return TensorFact(name, dtype, tuple(shape), data_start + begin, needed)


def _check_layout(path: Path, facts: list[TensorFact], data_start: int, size: int) -> None:
    """Check that tensors have no overlaps or gaps and end within the file, else it is truncated."""
    position = data_start
    previous = "the header"
    for fact in facts:
        if fact.offset != position:
            kind = "overlaps" if fact.offset < position else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {fact.name!r} {kind} {previous}")
        position += fact.num_bytes
        previous = repr(fact.name)
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: its header announces {position:,} bytes, "
            f"{size:,} are on disk; get it again"
        )
    if position < size:
        raise CheckpointError(
            f"{path} holds {size - position:,} bytes more than its header announces ({position:,})"
        )
