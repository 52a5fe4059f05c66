"""Match a component's file with its module's parameters; a leftover on either side is an error.

Names may be the module's own, the authors' or another program's, with or without a prefix
(`component_keys`, `name_maps`, `autoencoder_names`, `text_encoder_names`). Weights may be scaled
8-bit or GGUF. Only headers are read here; tensors are read, decoded and split one at a time as the
module is loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from everyframe.adapters.autoencoder_names import AUTOENCODERS
from everyframe.adapters.component_keys import LEFT_OUT, OTHERS, PREFIXES
from everyframe.adapters.gguf_file import GgufFile
from everyframe.adapters.gguf_header import MAGIC
from everyframe.adapters.lora_file import join_problems
from everyframe.adapters.model_signatures import identify_widths
from everyframe.adapters.name_maps import NAME_MAPS, Rename
from everyframe.adapters.text_encoder_names import PERMUTED, TEXT_ENCODERS
from everyframe.adapters.unet_names import unet_renames
from everyframe.adapters.weight_sites import Rows, Shape, WeightSites
from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.scaled_file import with_scales
from everyframe.checkpoints.tensor_file import PackedRows, TensorFile, open_checkpoint
from everyframe.core.errors import CheckpointError
from everyframe.core.options import shown
from everyframe.runtime.components.patchable import WeightTable


@dataclass(frozen=True)
class Piece:
    """Place of a parameter in the file: a tensor and its rows; None for all rows in order."""

    name: str
    rows: tuple[tuple[int, int], ...] | None
    shape: Shape


class ComponentTensors(TensorFile):
    """The tensors of a component's file by the names of its module's parameters."""

    def __init__(self, stored: TensorFile, pieces: Mapping[str, Piece]) -> None:
        entries = {}
        for name, piece in pieces.items():
            entry = stored.entry(piece.name)
            share = math.prod(piece.shape) / max(1, math.prod(entry.shape))
            size = round(entry.num_bytes * share)
            entries[name] = replace(entry, shape=piece.shape, num_bytes=size)
        super().__init__(stored.source, entries)
        self._stored, self._pieces = stored, dict(pieces)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype after reading."""
        return self._stored.dtype(self._pieces[name].name)

    def load(
        self,
        name: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `TensorFile.load`."""
        self.entry(name)
        piece = self._pieces[name]
        if piece.rows is None:
            return self._stored.load(piece.name, device, dtype).view(piece.shape)
        rows = self._stored.load_rows(piece.name, piece.rows)
        return rows.view(piece.shape).to(device=device, dtype=dtype)

    def quantized(self, name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `TensorFile.quantized`."""
        piece = self._pieces[name]
        found = None if piece.rows is not None else self._stored.quantized(piece.name, kind)
        return None if found is None else (found[0].view(piece.shape), found[1])

    def packed_bytes(self, name: str) -> int | None:
        """See `TensorFile.packed_bytes`."""
        piece = self._pieces[name]
        is_whole = piece.rows is None and piece.shape == self._stored.shape(piece.name)
        return self._stored.packed_bytes(piece.name) if is_whole else None

    def packed(self, name: str) -> PackedRows:
        """See `TensorFile.packed`."""
        return self._stored.packed(self._pieces[name].name)


@dataclass(frozen=True)
class MatchedComponent:
    """A component's file, matched with its module.

    Attributes:
        tensors: by the names of the module's parameters.
        notes: messages for the user.
    """

    tensors: TensorFile
    notes: tuple[str, ...]


def open_stored(path: Path) -> tuple[TensorFile, tuple[str, ...]]:
    """Open a file of weights in any supported format; returns it with notes on how it is stored.

    Raises:
        CheckpointError: no such file, truncated, or in an unknown format.
        MissingPackageError: it is a GGUF file and the `gguf` package is not installed.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    if is_gguf or path.suffix == ".gguf":
        stored = GgufFile(path)
        kinds = ", ".join(stored.kinds)
        return stored, (f"{path.name} is stored as GGUF, {kinds}",) if kinds else ()
    return with_scales(open_checkpoint(path))


def match_component(
    path: Path,
    table: WeightTable,
    where: str,
    keys: Callable[[str], str | None] = lambda name: name,
) -> MatchedComponent:
    """Match a file with a module's parameters and persistent buffers; `where` is for messages.

    `keys` maps names in the model's own files to names of the module.

    Raises:
        CheckpointError: a tensor fits no parameter, or a parameter has no tensor or one of another
            shape. The text names them, and the model that the file seems to be made for.
    """
    stored, notes = open_stored(path)
    readings = (
        _Reading(stored, sites, prefix, keys)
        for sites in _layouts(table)
        for prefix in PREFIXES
        if not prefix or any(name.startswith(prefix) for name in stored)
    )
    best = max(readings, key=lambda reading: reading.rank)
    left = best.check(where)
    return MatchedComponent(ComponentTensors(stored, best.pieces), (*notes, *left))


def _layouts(table: WeightTable) -> Iterator[WeightSites]:
    """Layouts of the module's tensor names, its own names first."""
    yield WeightSites(table, lambda modules: ())
    own = NAME_MAPS.get(table.class_name)
    layouts: list[Callable[[Collection[str]], Iterable[Rename]]] = []
    if own is not None:
        layouts.append(lambda modules: own)
    layouts += AUTOENCODERS.get(table.class_name, ())
    for each in TEXT_ENCODERS.get(table.class_name, ()):
        layouts.append(lambda modules, each=each: each)  # type: ignore[misc]
    if not layouts:
        layouts.append(unet_renames)
    for layout in layouts:
        yield WeightSites(table, layout)


class _Reading:
    """A file's names, read with one layout and one prefix."""

    def __init__(
        self,
        stored: TensorFile,
        sites: WeightSites,
        prefix: str,
        keys: Callable[[str], str | None],
    ) -> None:
        self._stored, self._sites, self._prefix, self._keys = stored, sites, prefix, keys
        self.pieces: dict[str, Piece] = {}
        self._unknown: list[str] = []
        self._twice: list[str] = []
        self._misshapen: list[str] = []
        self._left: Counter[str] = Counter()
        for name in stored:
            self._read(name)

    @property
    def rank(self) -> tuple[int, int]:
        """How well the reading fits; larger is better."""
        return len(self.pieces), -len(self._unknown) - len(self._misshapen) - len(self._twice)

    def _read(self, name: str) -> None:
        own = name.removeprefix(self._prefix) if name.startswith(self._prefix) else None
        found = None if own is None else self._sites.parameters(own)
        if found is None and own is not None:
            found = self._sites.parameters(self._keys(own) or "")
        if found is None:
            self._leave(name, own)
            return
        shape = self._stored.shape(name)
        total = sum(each[1][0] if each[1] else 1 for each in found)
        for parameter, wanted, rows in found:
            if parameter in self.pieces:
                self._twice.append(f"{name!r} and {self.pieces[parameter].name!r}")
                continue
            whole = wanted if rows is None else (rows.total, *wanted[1:])
            if not _is_same(shape, whole) or (rows is not None and total != rows.total):
                self._misshapen.append(f"{name!r} has shape {shape}, expected {whole}")
                pieces = None
            else:
                pieces = self._rows(name, rows, whole)
            self.pieces[parameter] = Piece(name, pieces, wanted)

    def _rows(
        self, name: str, rows: Rows | None, whole: Shape
    ) -> tuple[tuple[int, int], ...] | None:
        """Rows of a tensor that belong to its parameter, in the parameter's order."""
        layer = name.split(".")[-2] if "." in name else ""
        keys = PERMUTED.get(self._sites.table.class_name, {}).get(layer)
        if keys is None:
            return None if rows is None else rows.pieces
        metadata = getattr(self._stored, "metadata", {})
        heads = next((metadata[key] for key in keys if key in metadata), None)
        if type(heads) is not int or heads < 1 or whole[0] % (2 * heads):
            raise CheckpointError(
                f"{self._stored.source.name}: {keys[0]} is {shown(heads)}, which is no number of "
                f"heads of {name!r}, whose rows lie by them; get the file again"
            )
        # llama.cpp interleaves the halves of each head, which transformers rotates apart.
        size = whole[0] // heads
        order = (
            head * size + 2 * place + half
            for head in range(heads)
            for half in range(2)
            for place in range(size // 2)
        )
        return tuple((row, row + 1) for row in order)

    def _leave(self, name: str, own: str | None) -> None:
        for each in LEFT_OUT:
            if re.fullmatch(each.pattern, own or name) or re.fullmatch(each.pattern, name):
                self._left[each.description] += 1
                return
        others = (each for each in OTHERS if each != self._prefix)
        if any(name.startswith(other) for other in others) and self._prefix:
            self._left["other components"] += 1
            return
        self._unknown.append(name)

    def check(self, where: str) -> tuple[str, ...]:
        """Notes on tensors that are left out. Raises `CheckpointError` for those that don't fit."""
        table, file = self._sites.table, self._stored.source.name
        tied = {name: group for group in table.tied for name in group}
        lacking = [
            name
            for name in table.shapes
            if not any(each in self.pieces for each in tied.get(name, (name,)))
        ]
        if not self.pieces:
            raise CheckpointError(
                f"{file} is no file for {where}: it has none of its {len(table.shapes)} tensors"
                f"{self._looks()}"
            )
        problems = []
        if self._unknown:
            problems.append(
                f"{len(self._unknown)} tensors are for no parameter of it: "
                f"{listing([repr(name) for name in self._unknown])}"
            )
        if lacking:
            problems.append(
                f"it lacks {len(lacking)} of {len(table.shapes)} tensors: "
                f"{listing([repr(name) for name in lacking])}"
            )
        if self._twice:
            problems.append(f"{self._twice[0]} are both for one parameter")
        problems += self._misshapen
        if problems:
            raise CheckpointError(
                f"{file} is no file for {where}: {join_problems(problems)}{self._looks()}"
            )
        return tuple(
            f"{file}: {count} tensors are left out: {what}" for what, count in self._left.items()
        )

    def _looks(self) -> str:
        widths = {}
        for name in self._stored:
            shape = self._stored.shape(name)
            stem, _, kind = name.rpartition(".")
            if kind == "weight" and len(shape) > 1:
                widths[stem] = math.prod(shape[1:])
        looks = identify_widths(widths)
        return f"; it looks like {looks}" if looks else ""


def _is_same(shape: Shape, wanted: Shape) -> bool:
    """Whether shapes are equal except for sides of 1, as 1x1 kernels and matrices are."""
    if shape == wanted:
        return True
    return [side for side in shape if side != 1] == [side for side in wanted if side != 1]
