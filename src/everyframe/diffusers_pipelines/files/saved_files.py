"""The changed files of a pipeline's checkpoint, for `runtime.saved_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from everyframe.checkpoints.patched_file import PatchedTensorFile
from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.diffusers_pipelines.files.checkpoint import (
    OWN_WEIGHTS,
    ComponentFolder,
    PipelineFiles,
)
from everyframe.diffusers_pipelines.files.component_classes import component_class, empty_component
from everyframe.diffusers_pipelines.files.component_tensors import (
    has_own_names,
    own_tensors,
    tensor_files,
)
from everyframe.diffusers_pipelines.files.components import needs_of
from everyframe.diffusers_pipelines.library_patches import quiet_libraries
from everyframe.precision.islands import WORTH, is_in_island, weight_bytes
from everyframe.precision.quantization import rows
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.saved_checkpoint import ChangedFile


def changed_files(files: PipelineFiles, quantize: str) -> list[ChangedFile]:
    """See `SavableSpec.changed_files`."""
    found = []
    for part in files.models:
        layers = _layers(files, part, quantize) if quantize else set[str]()
        if part.patches or part.tensors or layers:
            found.append(_changed(files, part, dict.fromkeys(layers, quantize)))
    if quantize and not any(each.quantized for each in found):
        raise InputError(f"quantize has no effect on {files.where}: nothing of it is quantized")
    return found


def _layers(files: PipelineFiles, part: ComponentFolder, kind: str) -> set[str]:
    """Names of the weights of a component that get eight bits, as a plan decides."""
    needs = needs_of(part, tensor_files(part))
    if needs.prefers == "float32":
        return set()
    with quiet_libraries():
        module = build_on_meta(partial(empty_component, part))
    count = {name: each.numel() for name, each in module.named_parameters()}
    whole = Precision("bfloat16", "bfloat16", needs.islands)
    found = rows(module, replace(whole, weight_dtype=kind))
    if weight_bytes(count, whole, rows=found) >= WORTH * weight_bytes(count, whole):
        return set()
    if not has_own_names(part):
        raise InputError(
            f"the {part.name} of {files.where} is stored by names of an older diffusers, so it "
            "can't be saved quantized; save it with diffusers first (pipe.save_pretrained)"
        )
    return {*found}


def _changed(
    files: PipelineFiles, part: ComponentFolder, quantized: Mapping[str, str]
) -> ChangedFile:
    place = part.folder.relative_to(files.folder)
    opened = tensor_files(part)
    tensors = PatchedTensorFile(own_tensors(part), part.patches)
    changed = {
        name
        for name in tensors
        if name in part.patches or tensors.dtype(name) != tensors.entry(name).dtype
    }
    needs = needs_of(part, opened)
    islands = (*needs.islands, *needs.range_islands)
    old = [file for file in sorted(part.folder.iterdir()) if _is_weights(file)]
    # What was not read by the libraries is not read by them again: they round float32 islands.
    is_ours = part.tensors is not None or bool(quantized)
    return ChangedFile(
        place / _name(part, is_ours=is_ours),
        tensors,
        changed,
        {name: kind for name, kind in quantized.items() if name in tensors},
        wide={name for name in tensors if is_in_island(name, islands)},
        replaces=tuple(place / file.name for file in old),
        beside={place / OWN_WEIGHTS: "{}\n"} if is_ours else {},
    )


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin") or ".index." in file.name


def _name(part: ComponentFolder, *, is_ours: bool) -> str:
    from diffusers import ModelMixin

    stem = "diffusion_pytorch_model" if issubclass(component_class(part), ModelMixin) else "model"
    variant = f".{part.variant}" if part.variant and not is_ours else ""
    return f"{stem}{variant}.safetensors"
