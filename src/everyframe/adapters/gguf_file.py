"""Tensors of a GGUF file, dequantized as they are read, a few rows at a time.

Values equal those of the `gguf` package bit for bit. The most common types have faster code of ours
(`gguf_blocks.py`), all others use the package. Memory beyond the result is a few megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from everyframe.adapters.gguf_blocks import WIDENED, widen_blocks
from everyframe.adapters.gguf_header import GgufTensor, read_gguf_header
from everyframe.checkpoints.tensor_file import MANY_RUNS, PackedRows, TensorFile
from everyframe.checkpoints.torch_file import TensorLocation, read_entry
from everyframe.core.errors import CheckpointError, MissingPackageError, did_you_mean

#: Kinds that torch has itself, by ggml's numbers.
_PLAIN = {
    0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32,
    27: torch.int64, 28: torch.float64, 30: torch.bfloat16,
}  # fmt: skip
#: Elements dequantized at once.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _Kind:
    """A quantized kind: elements of a block, its bytes, and its name."""

    block: int
    num_bytes: int
    name: str


class GgufFile(TensorFile):
    """The tensors of a GGUF file; those of a quantized kind are read as float32.

    Attributes:
        kinds: names of the quantized kinds in it, the most frequent first.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self._kinds: dict[str, _Kind] = {}
        entries = {
            name: self._locate(path, tensor, header.num_bytes)
            for name, tensor in header.tensors.items()
        }
        _check_layout(path, entries)
        super().__init__(path, entries)
        self.metadata = header.metadata
        names = [each.name for each in self._kinds.values()]
        self.kinds = tuple(sorted({*names}, key=lambda name: -names.count(name)))

    def _locate(self, path: Path, tensor: GgufTensor, size: int) -> TensorLocation:
        count = math.prod(tensor.shape)
        plain = _PLAIN.get(tensor.kind)
        if plain is not None:
            num_bytes, dtype = count * plain.itemsize, plain
        else:
            kind = self._kinds[tensor.name] = _kind(path, tensor)
            if not tensor.shape or count % kind.block:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} has the shape {tensor.shape}, which is no "
                    f"whole number of {kind.name}'s blocks of {kind.block}"
                )
            num_bytes, dtype = count // kind.block * kind.num_bytes, torch.uint8
        if tensor.offset + num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} ends at "
                f"{tensor.offset + num_bytes:,}, {size:,} bytes are on disk; get it again"
            )
        return TensorLocation(path, dtype, tensor.shape, tensor.offset, num_bytes)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype after reading."""
        return torch.float32 if name in self._kinds else super().dtype(name)

    def load(
        self,
        name: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `TensorFile.load`."""
        if name not in self._kinds:
            return super().load(name, device, dtype)
        return self._values(name, 0, math.prod(self.shape(name)), dtype).view(
            self.shape(name)
        ).to(device)  # fmt: skip

    def packed_bytes(self, name: str) -> int | None:
        """See `TensorFile.packed_bytes`."""
        shape = self.shape(name)
        if name not in self._kinds or len(shape) != 2 or shape[1] % self._kinds[name].block:
            return None
        return self.entry(name).num_bytes

    def packed(self, name: str) -> PackedRows:
        """See `TensorFile.packed`."""
        kind, entry, (num_rows, columns) = self._kinds[name], self.entry(name), self.shape(name)
        width = columns // kind.block * kind.num_bytes
        codes = read_entry(replace(entry, shape=(num_rows, width)), name).view(torch.int8)

        def widen(rows: torch.Tensor) -> torch.Tensor:
            blocks = rows.view(torch.uint8).reshape(-1, kind.num_bytes)
            values = torch.empty(len(rows) * columns)
            _dequantize(blocks, kind, values)
            return values.view(len(rows), columns)

        return PackedRows(codes, widen)

    def load_rows(self, name: str, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See `TensorFile.load_rows`."""
        if name not in self._kinds:
            return super().load_rows(name, rows)
        shape = self.shape(name)
        inner = math.prod(shape[1:])
        # Blocks may span rows.
        if inner % self._kinds[name].block or len(rows) > MANY_RUNS:
            whole = self.load(name)
            return torch.cat([whole[first:end] for first, end in rows])
        parts = [self._values(name, first * inner, end * inner, None) for first, end in rows]
        return torch.cat(parts).view(-1, *shape[1:])

    def _values(self, name: str, first: int, end: int, dtype: torch.dtype | None) -> torch.Tensor:
        """Elements of a tensor from `first` to `end`, both at ends of blocks."""
        kind, entry = self._kinds[name], self.entry(name)
        values = torch.empty(end - first, dtype=dtype or torch.float32)
        step = _AT_ONCE // kind.block * kind.block
        for begin in range(first, end, step):
            last = min(begin + step, end)
            num_bytes = (last - begin) // kind.block * kind.num_bytes
            blocks = replace(
                entry,
                shape=(num_bytes // kind.num_bytes, kind.num_bytes),
                offset=entry.offset + begin // kind.block * kind.num_bytes,
                num_bytes=num_bytes,
            )
            part = values[begin - first : last - first]
            is_float32 = values.dtype == torch.float32
            found = part if is_float32 else torch.empty(last - begin)
            _dequantize(read_entry(blocks, name), kind, found)
            if not is_float32:
                part.copy_(found)
        return values


def _check_layout(path: Path, entries: Mapping[str, TensorLocation]) -> None:
    """Raise `CheckpointError` if tensors share bytes."""
    in_order = sorted(entries.items(), key=lambda item: item[1].offset)
    for (before, first), (name, entry) in pairwise(in_order):
        if first.offset + first.num_bytes > entry.offset:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps {before!r}; get it again")


def _dequantize(blocks: torch.Tensor, kind: _Kind, out: torch.Tensor) -> None:
    """Write the values of blocks, uint8 (N, bytes), into `out`, float32 (N * elements)."""
    if kind.name in WIDENED:
        widen_blocks(blocks, kind.name, out.view(-1, kind.block))
        return
    gguf = _package(None)
    with gguf.quants.np.errstate(all="ignore"):
        found = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.name])
    out.copy_(torch.from_numpy(found).view(-1))


def _kind(path: Path, tensor: GgufTensor) -> _Kind:
    """The kind of a tensor's blocks.

    Raises:
        CheckpointError: the package knows no such kind, or can't read it.
        MissingPackageError: the package is not installed.
    """
    gguf = _package(path)
    known = _readable()
    if tensor.kind not in known:
        kinds = {int(each): each.name for each in gguf.GGMLQuantizationType}
        name = kinds.get(tensor.kind, f"number {tensor.kind}")
        hint = did_you_mean(name, [each.name for each in known.values()])
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} is of the kind {name}, which gguf can't read{hint}; "
            "a newer one may (pip install -U gguf)"
        )
    return known[tensor.kind]


@cache
def _readable() -> dict[int, _Kind]:
    """The kinds that the installed package dequantizes."""
    gguf = _package(None)
    sizes = gguf.GGML_QUANT_SIZES
    return {
        int(each): _Kind(sizes[each][0], sizes[each][1], each.name)
        for each in gguf.GGMLQuantizationType
        if each in gguf.quants._type_traits
    }


def _package(path: Path | None) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise MissingPackageError(
            f"{path or 'a GGUF file'} is quantized as GGUF, which the package gguf reads: "
            "pip install 'everyframe[gguf]'"
        ) from error
    return gguf
