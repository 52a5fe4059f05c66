"""Read a checkpoint's tensors by name: from a file, a set of shards, or a folder of either.

Opening reads headers only; `TensorFile.load` reads one tensor into memory of its own. From pickles
only tensors are read (`torch_file`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from everyframe.checkpoints.folder import (
    PICKLE_SUFFIXES,
    check_inside,
    describe_missing,
    is_plain_name,
    listing,
    read_json,
)
from everyframe.checkpoints.safetensors_header import read_header
from everyframe.checkpoints.torch_file import TensorLocation, pickle_entries, read_entry
from everyframe.core.errors import CheckpointError, did_you_mean

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32,
    "U64": torch.uint64, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

_INDEX = ".index.json"
#: Runs of rows beyond which a tensor is read at once and cut then.
MANY_RUNS = 64
#: Elements that are read and cast at once.
_AT_ONCE = 1 << 20
#: Matches a variant's index too: ``model.safetensors.index.fp16.json``.
_IS_INDEX = re.compile(r".*\.index(\.\w+)?\.json")

# Where a folder's weights are looked for, first found wins: whole files before shards (a folder
# may hold both, of the same weights) and safetensors before pickles.
_STANDARD_NAMES = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "*.safetensors.index.json",
    "*.safetensors.index.*.json",
    "*.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "*.pth",
    "*.pt",
    "*.bin",
)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a matrix in blocks of bytes.

    Attributes:
        codes: (rows, bytes of a row) int8, on the CPU.
        widen: gives float32 (n, columns) of n rows of codes.
    """

    codes: torch.Tensor
    widen: Callable[[torch.Tensor], torch.Tensor]


class TensorFile:
    """Tensors by name, read one at a time; returned by `open_checkpoint`.

    Attributes:
        source: the opened file or index, for error texts.
    """

    def __init__(self, source: Path, entries: Mapping[str, TensorLocation]) -> None:
        self.source = source
        self._entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that hold the tensors, for a digest; sorted by name."""
        return tuple(sorted({entry.path for entry in self._entries.values()}))

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape."""
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype."""
        return self.entry(name).dtype

    def load(
        self,
        name: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read one tensor into memory that it shares with no other.

        Args:
            name: its name in the checkpoint.
            device: target device.
            dtype: cast to this; as stored if None.

        Raises:
            CheckpointError: no such tensor, or the file has changed or cannot be read.
        """
        entry = self.entry(name)
        count = math.prod(entry.shape)
        is_plain = entry.stride is None and entry.resident is None
        if (
            dtype in (None, entry.dtype)
            or torch.device(device).type != "cpu"
            or not (is_plain and count > _AT_ONCE)
        ):
            return read_entry(entry, name).to(device=device, dtype=dtype)
        # In pieces: the tensor is in memory once, in the dtype that it gets.
        values, size = torch.empty(count, dtype=dtype), entry.dtype.itemsize
        for first in range(0, count, _AT_ONCE):
            end = min(first + _AT_ONCE, count)
            offset, num_bytes = entry.offset + first * size, (end - first) * size
            piece = replace(entry, shape=(end - first,), offset=offset, num_bytes=num_bytes)
            values[first:end] = read_entry(piece, name)
        return values.view(entry.shape)

    def quantized(self, name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes (out, in) int8 and scales (out, 1) float32, if the file stores a weight so.

        `kind` is ``int8`` or ``fp8``, as in `precision.quantization`.
        """
        return None

    def packed_bytes(self, name: str) -> int | None:
        """Bytes of a matrix whose rows the file stores in blocks of their own; None for others."""
        return None

    def packed(self, name: str) -> PackedRows:
        """The rows of a matrix that has `packed_bytes`, as they are stored."""
        raise AssertionError(f"{name} is not stored in blocks")

    def load_rows(self, name: str, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Read runs of rows (first, end) of one tensor, one after the other, in its own dtype.

        Raises:
            CheckpointError: as `load`.
        """
        entry = self.entry(name)
        if entry.resident is not None or entry.stride is not None or len(rows) > MANY_RUNS:
            whole = self.load(name)
            return torch.cat([whole[first:end] for first, end in rows])
        size = entry.num_bytes // max(1, entry.shape[0])
        return torch.cat(
            [
                read_entry(
                    replace(
                        entry,
                        shape=(end - first, *entry.shape[1:]),
                        offset=entry.offset + first * size,
                        num_bytes=(end - first) * size,
                    ),
                    name,
                )
                for first, end in rows
            ]
        )

    def entry(self, name: str) -> TensorLocation:
        """Location of one tensor; raises `CheckpointError` if there is none of that name."""
        try:
            return self._entries[name]
        except KeyError:
            hint = did_you_mean(name, self._entries)
            raise CheckpointError(f"{self.source} has no tensor {name!r}{hint}") from None


def open_checkpoint(
    path: str | Path | TensorFile, *, payload: str | None = None, variant: str | None = None
) -> TensorFile:
    """Open a checkpoint; reads and validates headers, but no tensors.

    Args:
        path: a ``.safetensors`` file, a ``.pth``/``.pt``/``.bin``/``.ckpt`` pickle of tensors, an
            ``.index.json`` of shards of either, or a folder that holds one of these. An open
            `TensorFile` is returned as it is.
        payload: for a pickle that holds several state dicts, the key of the wanted one, such as
            ``"ema"``.
        variant: of a folder, which of several stored precisions: ``"fp16"`` opens
            ``model.fp16.safetensors``. Without one, the plain names come first.

    Raises:
        CheckpointError: no such file, truncated, foreign, more than tensors, a shard missing.
    """
    if isinstance(path, TensorFile):
        return path
    path = Path(path)
    if path.is_dir():
        folder = path
        path = _weights_in(path, _STANDARD_NAMES if variant is None else _names_of(variant))
        check_inside(folder, [path])
    if _IS_INDEX.fullmatch(path.name):
        return _open_shards(path, payload)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return TensorFile(path, _safetensors_entries(path))
    if path.suffix in PICKLE_SUFFIXES:
        return TensorFile(path, pickle_entries(path, payload))
    raise CheckpointError(
        f"{path} is no checkpoint: its name ends in {path.suffix!r}, allowed are .safetensors, "
        f"{', '.join(PICKLE_SUFFIXES)} and {_INDEX}"
    )


def _names_of(variant: str) -> tuple[str, ...]:
    return f"*.safetensors.index.{variant}.json", f"*.{variant}.safetensors"


def _weights_in(folder: Path, patterns: tuple[str, ...]) -> Path:
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = [path.name for path in found]
            raise CheckpointError(
                f"{folder} holds more than one checkpoint: {listing(names)}; name the file "
                f"that is meant, or put the shards' {_INDEX} beside them"
            )
    expected = ["*.safetensors", "*.pth", "*.bin"] if patterns is _STANDARD_NAMES else patterns
    raise CheckpointError(describe_missing(folder, expected))


def _safetensors_entries(path: Path) -> dict[str, TensorLocation]:
    return {
        fact.name: TensorLocation(path, DTYPES[fact.dtype], fact.shape, fact.offset, fact.num_bytes)
        for fact in read_header(path).tensors.values()
    }


def _open_shards(index: Path, payload: str | None) -> TensorFile:
    """All tensors of all shards, including those not in the index, which strict loading reports."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    shards = sorted(set(table.values()))
    for shard in shards:
        if not is_plain_name(shard):
            raise CheckpointError(f"{index} names a shard outside its own folder: {shard!r}")
        if _IS_INDEX.fullmatch(shard):  # itself, maybe
            raise CheckpointError(f"{index} names an index as a shard: {shard!r}")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} shards that {index.name} "
            f"names: {listing(missing)}"
        )
    check_inside(index.parent, [index.parent / shard for shard in shards])
    entries: dict[str, TensorLocation] = {}
    for shard in shards:
        opened = open_checkpoint(index.parent / shard, payload=payload)
        twice = [name for name in opened if name in entries]
        if twice:
            raise CheckpointError(f"{opened.source} repeats tensors of other shards: {twice[0]!r}")
        entries.update(opened._entries)
    absent = [name for name, shard in table.items() if name not in entries]
    if absent:
        raise CheckpointError(
            f"{index} promises {len(absent)} tensors that its shards do not hold: {listing(absent)}"
        )
    return TensorFile(index, entries)
