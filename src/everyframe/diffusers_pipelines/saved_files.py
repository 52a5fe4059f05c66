"""The changed files of a pipeline's checkpoint, for `runtime.saved_checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everyframe.checkpoints.patched_file import PatchedTensorFile
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import InputError
from everyframe.diffusers_pipelines.checkpoint import (
    OWN_WEIGHTS,
    ComponentFolder,
    PipelineFiles,
)
from everyframe.diffusers_pipelines.component_classes import component_class
from everyframe.diffusers_pipelines.component_tensors import tensor_files
from everyframe.diffusers_pipelines.components import needs_of
from everyframe.precision.islands import in_island
from everyframe.runtime.saved_checkpoint import ChangedFile


class _JoinedFile(TensorFile):
    """The tensors of several files as those of one."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        owners = {name: file for file in files for name in file}
        super().__init__(files[0].source, {name: each.entry(name) for name, each in owners.items()})


def changed_files(files: PipelineFiles, quantize: str) -> list[ChangedFile]:
    """See `SavableSpec.changed_files`."""
    if quantize:
        raise InputError(
            f"quantize has no effect on {files.where}: diffusers' pipelines are not quantized here"
        )
    return [_changed(files, part) for part in files.models if part.patches or part.tensors]


def _changed(files: PipelineFiles, part: ComponentFolder) -> ChangedFile:
    place = part.folder.relative_to(files.folder)
    opened = tensor_files(part)
    joined = opened[0] if len(opened) == 1 else _JoinedFile(opened)
    tensors = PatchedTensorFile(joined, part.patches)
    changed = {
        name
        for name in tensors
        if name in part.patches or tensors.dtype(name) != tensors.entry(name).dtype
    }
    needs = needs_of(part, opened)
    islands = (*needs.islands, *needs.range_islands)
    old = [file for file in sorted(part.folder.iterdir()) if _is_weights(file)]
    # What was not read by the libraries is not read by them again: they round float32 islands.
    marker = {} if part.tensors is None else {place / OWN_WEIGHTS: "{}\n"}
    return ChangedFile(
        place / _name(part),
        tensors,
        changed,
        replaces=tuple(place / file.name for file in old),
        beside=marker,
        wide={name for name in tensors if in_island(name, islands)},
    )


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin") or ".index." in file.name


def _name(part: ComponentFolder) -> str:
    from diffusers import ModelMixin

    stem = "diffusion_pytorch_model" if issubclass(component_class(part), ModelMixin) else "model"
    variant = f".{part.variant}" if part.variant and part.tensors is None else ""
    return f"{stem}{variant}.safetensors"
