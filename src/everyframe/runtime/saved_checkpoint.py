"""Write a checkpoint with merged or quantized weights to a new folder, whole or not at all.

Files that don't change are copied. A changed tensor is written as it is merged, in float32 or in
the dtype that was asked for, so a run of the new folder has the bits of a run that merges.
Quantized weights are written as their codes and scales, which `checkpoints.scaled_file` reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from everyframe.checkpoints.folder import check_inside
from everyframe.checkpoints.safetensors_writer import TensorToWrite, write_safetensors
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import InputError
from everyframe.precision.quantization import quantize


@dataclass(frozen=True)
class ChangedFile:
    """A file of weights that replaces others.

    Attributes:
        path: in the new folder.
        tensors: its tensors, merged as they are read, by the names in the file.
        changed: names of those that are not as their file has them.
        quantized: kind of eight bits of a tensor, for those that get them.
        wide: names of those that are float32 in every precision.
        replaces: files of the old folder that are not copied, relative to it.
        beside: further small files, by their path in the new folder.
    """

    path: Path
    tensors: TensorFile
    changed: Collection[str]
    quantized: Mapping[str, str] = field(default_factory=dict)
    wide: Collection[str] = ()
    replaces: tuple[Path, ...] = ()
    beside: Mapping[Path, str] = field(default_factory=dict)


@runtime_checkable
class SavableSpec(Protocol):
    """A model that can be written to a folder with its merged weights."""

    def saved_from(self) -> Path:
        """The folder that holds all of it; raises `InputError` if there is none."""
        ...

    def changed_files(self, quantize: str) -> Sequence[ChangedFile]:
        """The files that differ from those in the folder.

        Raises:
            InputError: its weights can't be quantized to that kind.
        """
        ...


def save_checkpoint(model: SavableSpec, folder: Path, dtype: torch.dtype | None, kind: str) -> None:
    """Write the model to `folder`, which must not exist; `kind` of eight bits is empty for none.

    Raises:
        InputError: the folder exists or is in the model's own, or nothing of the model is changed.
        CheckpointError: a link leads out of the model's folder.
        OSError: it can't be written; nothing is left then.
    """
    source = model.saved_from()
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} exists already; give a new folder")
    if folder.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{folder} is inside the model's own folder; give one outside of {source}")
    changed = model.changed_files(kind)
    if not changed:
        raise InputError("nothing of the model would change; give loras, components or quantize")
    # Copies are often published: no link in a foreign folder may bring in this user's files.
    check_inside(source, source.rglob("*"))
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    try:
        replaced = {source / path for each in changed for path in each.replaces}

        def skipped(place: str, names: list[str]) -> set[str]:
            return {name for name in names if Path(place, name) in replaced}

        # Links of a hub's cache become files.
        shutil.copytree(source, unfinished, ignore=skipped)
        for each in changed:
            path = unfinished / each.path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(path, _tensors(each, dtype))
            for place, text in each.beside.items():
                (unfinished / place).write_text(text, encoding="utf-8")
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _tensors(file: ChangedFile, dtype: torch.dtype | None) -> Iterator[TensorToWrite]:
    tensors = file.tensors
    for name in tensors:
        own = tensors.dtype(name)
        kind = file.quantized.get(name)
        if kind is not None:
            yield from _codes(tensors, name, kind)
            continue
        wanted = own
        if name in file.changed and own.is_floating_point:
            wanted = torch.float32 if dtype is None or name in file.wide else dtype

        def read(name: str = name, wanted: torch.dtype = wanted) -> torch.Tensor:
            return tensors.load(name, dtype=wanted)

        yield TensorToWrite(name, wanted, tensors.shape(name), read)


def _codes(tensors: TensorFile, name: str, kind: str) -> Iterator[TensorToWrite]:
    """Codes, scales and format of a quantized weight, in ComfyUI's form."""
    shape, stem = tensors.shape(name), name.removesuffix("weight")
    stored, text = _STORED[kind]
    described = torch.tensor(list(json.dumps({"format": text}).encode()), dtype=torch.uint8)

    # Codes are written first; rounding once gives both, and scales are small enough to wait.
    scales: list[torch.Tensor] = []

    def codes() -> torch.Tensor:
        values, scale = quantize(tensors.load(name), kind, torch.device("cpu"))
        scales.append(scale.reshape(-1))
        return values.view(stored)

    yield TensorToWrite(name, stored, shape, codes)
    yield TensorToWrite(f"{stem}weight_scale", torch.float32, shape[:1], scales.pop)
    yield TensorToWrite(
        f"{stem}comfy_quant", torch.uint8, tuple(described.shape), lambda: described
    )


_STORED = {
    "int8": (torch.int8, "int8_tensorwise"),
    "fp8": (torch.float8_e4m3fn, "float8_e4m3fn"),
}
