"""Trace file: a zip of a JSON header and safetensors tables.

It contains no code, and no file name or path of the machine. Writing is atomic (temporary file,
then rename). A file that is not a trace, truncated or inconsistent raises a one-line `InputError`.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.core.paths import check_path
from everyframe.numerics.trace.fingerprint import NUM_NUMBERS
from everyframe.numerics.trace.output_check import HEADER, TABLES, check_place
from everyframe.numerics.trace.trace import Call, Kind, Trace, TracedModule, TracedTensor

SCHEMA: Final = "everyframe.trace/1"
_FULL = "full.safetensors"
_KINDS: tuple[Kind, ...] = ("weight", "input", "output")
#: Largest unpacked size in bytes of the header and tables (1 GiB), far above any real trace.
_MOST_BYTES = 1 << 30
#: Largest compression ratio, for traces that unpack to more than `_SMALL` bytes.
_MOST_TIMES, _SMALL = 200, 1 << 24

_Name = TypeVar("_Name")


class _Header(BaseModel):
    """JSON header. Names are stored once and referred to by index in the tables."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: Literal["everyframe.trace/1"]
    same: dict[str, str]
    about: dict[str, str]
    ended: str
    parts: list[list[str]]
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    arguments: dict[str, Any]


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace. Raises `InputError` if the path is unusable, `OSError` for a full disk."""
    place = check_place(path)
    names, dtypes = _Numbered[str](), _Numbered[str]()
    shapes = _Numbered[tuple[int, ...]]()
    calls = [(call.part, call.number, call.nth, call.parent) for call in trace.calls]
    seen = [
        (each.call, _KINDS.index(each.kind), names[each.name], dtypes[each.dtype],
         shapes[each.shape], each.row)
        for each in trace.seen
    ]  # fmt: skip
    tables = {
        "calls": torch.tensor(calls, dtype=torch.int32, device="cpu").reshape(-1, 4),
        "seen": torch.tensor(seen, dtype=torch.int32, device="cpu").reshape(-1, 6),
        "numbers": torch.from_numpy(trace.numbers),
    }
    header = _Header(
        schema_=SCHEMA, same=dict(trace.same), about=dict(trace.about), ended=trace.ended,
        parts=[[part.component, part.module, part.kind] for part in trace.parts],
        names=list(names), dtypes=list(dtypes), shapes=[list(shape) for shape in shapes],
        arguments={str(call): each for call, each in trace.arguments.items()},
    )  # fmt: skip
    work = place.with_name(f".{place.name}.partial")
    try:
        with zipfile.ZipFile(work, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(HEADER, header.model_dump_json())
            file.writestr(TABLES, save(tables))
            if trace.full:
                full = {str(row): tensor for row, tensor in trace.full.items()}
                # Activations do not compress.
                file.writestr(_FULL, save(full), zipfile.ZIP_STORED)
        os.replace(work, place)
    finally:
        work.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file. Raises `InputError` if it is not a trace or is broken."""
    text = check_path(path, "a trace")
    if not os.path.isfile(text):
        raise InputError(f"there is no trace {text!r}")
    try:
        with zipfile.ZipFile(text) as file:
            inside = {info.filename: info.file_size for info in file.infolist()}
            if {HEADER, TABLES} - inside.keys() or inside.keys() - {HEADER, TABLES, _FULL}:
                raise InputError(f"{text!r} is a zip, and no trace of everyframe")
            if _is_bomb(file.infolist()):
                raise InputError(f"{text!r} unpacks to more than any trace of everyframe")
            header = _Header.model_validate_json(file.read(HEADER))
            tables = load(file.read(TABLES))
            full = load(file.read(_FULL)) if _FULL in inside else {}
        return _trace(header, tables, full)
    except zipfile.BadZipFile:
        raise InputError(f"{text!r} is no trace of everyframe, or was cut off") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise InputError(
            f"{text!r} is no trace that this version reads ({SCHEMA}): {where}: {problem['msg']}"
        ) from None
    except (SafetensorError, _BrokenError, zlib.error, struct.error, EOFError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the trace {text!r} is broken: {error}") from None


def _is_bomb(inside: Sequence[zipfile.ZipInfo]) -> bool:
    """Whether it unpacks to more than a real trace would; whole tensors are stored uncompressed."""
    packed = [each for each in inside if each.filename != _FULL]
    whole = [each for each in inside if each.filename == _FULL]
    size, taken = (sum(getattr(e, n) for e in packed) for n in ("file_size", "compress_size"))
    is_swollen = size > _MOST_BYTES or size > max(_SMALL, _MOST_TIMES * taken)
    return is_swollen or any(each.file_size > each.compress_size for each in whole)


class _BrokenError(Exception):
    """Inconsistent tables."""


class _Numbered(dict[_Name, int]):
    """Dictionary that numbers each key when it is first looked up."""

    def __missing__(self, key: _Name) -> int:
        self[key] = len(self)
        return self[key]


def _trace(header: _Header, tables: dict[str, Tensor], full: dict[str, Tensor]) -> Trace:
    if set(tables) != {"calls", "seen", "numbers"}:
        raise _BrokenError(f"it has the tables {', '.join(sorted(tables))}")
    prints = tables["numbers"]
    is_table = prints.ndim == 2 and prints.shape[1] == NUM_NUMBERS
    if not is_table or prints.dtype not in (torch.float32, torch.float64):
        raise _BrokenError(f"its fingerprints are {prints.dtype} {tuple(prints.shape)}")
    numbers = prints.numpy()
    calls, seen = _table(tables["calls"], 4), _table(tables["seen"], 6)
    _check_below(calls[:, 0], len(header.parts), "modules")
    parents = calls[:, 3]
    if (parents >= np.arange(len(calls))).any() or (parents < -1).any():
        raise _BrokenError("its calls are not in order")
    # Both count calls, from 1; a picture of the comparison has a column for each.
    _check_below(calls[:, 1:3] - 1, len(calls), "numbers of calls")
    for column, known, what in (
        (0, len(calls), "calls"), (1, len(_KINDS), "kinds"), (2, len(header.names), "names"),
        (3, len(header.dtypes), "dtypes"), (4, len(header.shapes), "shapes"),
        (5, len(numbers), "fingerprints"),
    ):  # fmt: skip
        _check_below(seen[:, column], known, what)
    if any(len(part) != 3 for part in header.parts):
        raise _BrokenError("its modules are not named as they should be")
    shapes = [tuple(shape) for shape in header.shapes]
    return Trace(
        header.same,
        header.about,
        tuple(TracedModule(*part) for part in header.parts),
        tuple(Call(*map(int, row)) for row in calls.tolist()),
        tuple(
            TracedTensor(
                call, _KINDS[kind], header.names[name], header.dtypes[dtype], shapes[shape], row
            )
            for call, kind, name, dtype, shape, row in seen.tolist()
        ),
        numbers,
        header.ended,
        {int(key): tensor for key, tensor in full.items()},
        {int(key): each for key, each in header.arguments.items()},
    )


def _table(tensor: Tensor, width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    if tensor.dtype != torch.int32 or tensor.ndim != 2 or tensor.shape[1] != width:
        raise _BrokenError(f"one of its tables is {tensor.dtype} {tuple(tensor.shape)}")
    table: np.ndarray[Any, np.dtype[np.int32]] = tensor.numpy()
    return table


def _check_below(column: np.ndarray[Any, Any], known: int, what: str) -> None:
    if column.size and (column.min() < 0 or column.max() >= known):
        raise _BrokenError(f"it names {what} that it does not hold")
