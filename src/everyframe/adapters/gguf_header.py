"""GGUF headers: name, kind, shape and position of each tensor, read without the `gguf` package.

A count or length that the file can't hold is an error before anything of that size is allocated.
Metadata arrays are skipped, except for short arrays of numbers.
Format: https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from everyframe.core.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: struct's letters by GGUF's number of a value type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
#: Original shapes, which ComfyUI-GGUF keeps of tensors that it had to flatten.
_SHAPE_OF = "comfy.gguf.orig_shape."
_MOST_DIMENSIONS, _MOST_SIDE = 8, 2**40
#: Bytes of the shortest name or value, and of the shortest tensor's entry.
_LEAST_VALUE, _LEAST_TENSOR = 13, 24
#: Longest name, and longest array of numbers that is kept.
_LONGEST_NAME, _LONGEST_ARRAY = 65_535, 16

Value = int | float | bool | str | tuple[int, ...]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `kind` is ggml's number of its type, `shape` is in torch's order."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """All tensors of a file, with positions from its beginning, and its short metadata."""

    num_bytes: int
    tensors: Mapping[str, GgufTensor]
    metadata: Mapping[str, Value] = field(default_factory=dict)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and validate the header of a GGUF file; reads no tensors.

    Raises:
        CheckpointError: no such file, not a GGUF file, truncated, or an impossible header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


class _Reader:
    """Reads values in order, and checks each length against the rest of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is a GGUF of version {version}; known are "
                f"{' and '.join(map(str, _VERSIONS))}, little-endian"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self._check_count(num_tensors, _LEAST_TENSOR, "tensors")
        self._check_count(num_values, _LEAST_VALUE, "values")
        metadata = dict(self._entry() for _ in range(num_values))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise CheckpointError(f"{self._path}: its alignment is {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in found:
            if name in tensors:
                raise CheckpointError(f"{self._path} has the tensor {name!r} twice")
            if offset % alignment or offset > self._size:
                raise CheckpointError(
                    f"{self._path}: tensor {name!r} is at {offset:,}, which is beyond the file's "
                    f"{self._size:,} bytes or not aligned to {alignment}; get the file again"
                )
            tensors[name] = GgufTensor(name, kind, self._shape(name, shape, metadata),
                                       start + offset)  # fmt: skip
        return GgufHeader(self._size, tensors, metadata)

    def _shape(
        self, name: str, stored: tuple[int, ...], metadata: Mapping[str, Value]
    ) -> tuple[int, ...]:
        """Shape of a tensor: the original one if the file says that it was flattened."""
        original = metadata.get(_SHAPE_OF + name)
        if original is None:
            return stored
        if (
            not isinstance(original, tuple)
            or any(side < 1 for side in original)
            or math.prod(original) != math.prod(stored)
        ):
            raise CheckpointError(
                f"{self._path}: {_SHAPE_OF}{name} is {original!r}, which does not hold the "
                f"elements of {stored}"
            )
        return original

    def _entry(self) -> tuple[str, Value]:
        name = self._text()
        kind = self._number("I")
        return name, self._value(name, kind)

    def _value(self, name: str, kind: int) -> Value:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text(is_short=False)
        if kind == _ARRAY:
            return self._array(name)
        raise CheckpointError(f"{self._path}: {name!r} has a value of the unknown type {kind}")

    def _array(self, name: str) -> tuple[int, ...]:
        """A short array of numbers; any other array is skipped and returned empty."""
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_count(count, 8, f"texts in {name!r}")
            # Inlined, as a tokenizer has hundreds of thousands.
            read, seek, left = self._file.read, self._file.seek, self._size - self._file.tell()
            for _ in range(count):
                length = int.from_bytes(read(8), "little")
                left -= 8 + length
                if left < 0:
                    raise CheckpointError(f"{self._path} is truncated: it ends within {name!r}")
                seek(length, 1)
            return ()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: {name!r} is an array of the unknown type {kind}")
        letter = _SCALARS[kind]
        if count > _LONGEST_ARRAY or letter in "fd":
            self._skip(count * struct.calcsize(letter), name)
            return ()
        return tuple(self._number(letter) for _ in range(count))

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        num_dimensions = self._number("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has {num_dimensions} dimensions, at most "
                f"{_MOST_DIMENSIONS} are allowed"
            )
        sides = tuple(self._number("Q") for _ in range(num_dimensions))
        if any(side > _MOST_SIDE for side in sides):
            raise CheckpointError(f"{self._path}: tensor {name!r} has the shape {sides[::-1]}")
        return name, self._number("I"), sides[::-1], self._number("Q")

    # -------------------------------------------------------------------------------------- bytes

    def _check_count(self, count: int, least: int, of_what: str) -> None:
        if count * least > self._size:
            raise CheckpointError(
                f"{self._path}: its header announces {count:,} {of_what}, more than its "
                f"{self._size:,} bytes can hold; the file is truncated or broken"
            )

    def _text(self, *, is_short: bool = True) -> str:
        length = self._number("Q")
        if length > (_LONGEST_NAME if is_short else self._size):
            raise CheckpointError(
                f"{self._path}: its header has a text of {length:,} bytes; the file is truncated "
                "or broken"
            )
        return self._take(length).decode("utf-8", "replace")

    def _number(self, letter: str) -> int:
        (found,) = struct.unpack(f"<{letter}", self._take(struct.calcsize(letter)))
        return found  # type: ignore[no-any-return]

    def _skip(self, length: int, name: str) -> None:
        if length > self._size - self._file.tell():
            raise CheckpointError(
                f"{self._path} is truncated: {name!r} alone takes {length:,} bytes; get it again"
            )
        self._file.seek(length, 1)

    def _take(self, length: int) -> bytes:
        # Before reading: `read` would allocate what a broken header asks for.
        if length > self._size - self._file.tell():
            raise CheckpointError(f"{self._path} is truncated: it ends within its header")
        return self._file.read(length)
