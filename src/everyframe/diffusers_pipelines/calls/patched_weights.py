"""Merge the patches of LoRAs into a pipeline's weights: read from files, or in memory for a call.

diffusers and transformers read the files themselves (`loading.py`), so each patched tensor is read
from its file once more, merged in float32 and put into its place. A pipeline in memory is patched
in place for the run; afterwards its weights have the bits and the storages that they had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.checkpoints.patched_file import PatchedTensorFile, Patches
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import ComponentPlan
from everyframe.diffusers_pipelines.calls.call import in_one_run, restore_after
from everyframe.diffusers_pipelines.calls.weight_hooks import host_copies, tensors_on_disk
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder, PipelineFiles
from everyframe.diffusers_pipelines.files.component_tensors import tensor_files
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.plain_tensors import is_plain
from everyframe.precision.upcast import has_float32
from everyframe.runtime.components.patchable import WeightTable


def tables_of_files(files: PipelineFiles) -> dict[str, WeightTable]:
    """Parameters of each component by the headers of its files."""
    meant = denoisers([part.name for part in files.models])
    return {
        part.name: WeightTable(
            part.class_name,
            {name: file.shape(name) for file in tensor_files(part) for name in file},
            part.name in meant,
        )
        for part in files.models
    }


def tables_of_modules(components: Mapping[str, Any]) -> dict[str, WeightTable]:
    """Parameters of each component of a loaded pipeline.

    Raises:
        InputError: diffusers has loaded an adapter into one, or has joined its projections.
    """
    modules = {name: _plain(each) for name, each in components.items() if _is_module(each)}
    tables = {}
    for name, module in modules.items():
        shapes = _shapes(module)
        if any(".base_layer." in key for key in shapes):
            raise InputError(
                f"the {name} of this pipeline has adapters of PEFT's; unload them before: "
                "pipe.unload_lora_weights()"
            )
        if any(map(_has_joined_projections, module.modules())):
            raise InputError(
                f"the {name} of this pipeline computes with copies of its projections that "
                "fuse_qkv_projections made, which no LoRA changes; undo that before: "
                f"pipe.{name}.unfuse_qkv_projections()"
            )
        tables[name] = WeightTable(type(module).__name__, shapes, name in denoisers(modules))
    return tables


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter; of a quantized weight that of its layer, as its own is of codes."""
    shapes = {key: tuple(each.shape) for key, each in module.named_parameters()}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not is_plain(layer.weight):
            shapes[f"{name}.weight"] = (layer.out_features, layer.in_features)
    return shapes


def _has_joined_projections(module: nn.Module) -> bool:
    """Whether it is an attention that computes with one joined copy of its projections.

    Diffusers' older attention keeps the copy, and the mark, when its processor is put back.
    """
    from diffusers.models.attention_processor import Attention

    if not getattr(module, "fused_projections", False):
        return False
    processor = type(getattr(module, "processor", None)).__name__
    return not isinstance(module, Attention) or processor.startswith("Fused")


def merge_from_files(where: str, part: ComponentFolder, module: nn.Module) -> None:
    """Merge the patches of a component that was just read from its files, in its own dtypes.

    Raises:
        CheckpointError: a patched parameter is not in the files under its name.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    opened = [PatchedTensorFile(open_checkpoint(file), part.patches) for file in part.weights]
    for name in part.patches:
        file = next((each for each in opened if name in each), None)
        parameter = _find_parameter(name, parameters)
        if file is None or parameter is None or parameter.shape != file.shape(name):
            raise CheckpointError(
                f"{where}: the files of its {part.name} hold {name!r} under another name than the "
                f"{type(module).__name__} has it, so no LoRA can be merged into it; save the "
                "pipeline again with today's diffusers (save_pretrained)"
            )
        parameter.data.copy_(file.load(name))


def rewrite_from_files(
    part: ComponentFolder, planned: ComponentPlan, module: nn.Module, names: Collection[str]
) -> bool:
    """Read these parameters of a loaded component again, with the patches of `part`.

    False, and nothing is changed, if one did not come from its file in the plan's own dtype.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    opened = [PatchedTensorFile(open_checkpoint(file), part.patches) for file in part.weights]
    dtype = torch_dtype(planned.precision.parameters)
    pairs = []
    for name in names:
        file = next((each for each in opened if name in each), None)
        parameter = _find_parameter(name, parameters)
        if file is None or parameter is None or parameter.dtype != dtype:
            return False
        pairs.append((file, name, parameter))
    is_changed = planned.precision.weight_dtype or planned.repairs or has_float32(module)
    if part.tensors is not None or is_changed:
        return False
    for file, name, parameter in pairs:
        parameter.copy_(file.load(name))
    return True


def _find_parameter(name: str, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """The parameter of that name in the file; older files have some below another module."""
    if name in parameters:
        return parameters[name]
    found = [key for key in parameters if f".{name}".endswith(f".{key}")]
    return parameters[found[0]] if len(found) == 1 else None


def patched_bytes(components: Mapping[str, Any], patches: Mapping[str, Patches]) -> int:
    """Bytes of the parameters that these patches change, which `merged_in_place` saves."""
    return sum(
        parameter.nbytes
        for component, own in patches.items()
        for name, parameter in _plain(components[component]).named_parameters()
        if name in own
    )


@contextmanager
def held_for_run(pipe: Any, patches: Mapping[str, Patches]) -> Iterator[None]:
    """Context: a run has this pipeline for itself, with its weights patched.

    Raises:
        InputError: another run uses it, or a patched weight is not in memory as numbers.
    """
    with in_one_run(pipe), restore_after(pipe), merged_in_place(pipe.components, patches):
        yield


@contextmanager
def merged_in_place(
    components: Mapping[str, Any], patches: Mapping[str, Patches]
) -> Iterator[None]:
    """Context: the patched parameters hold the merged weights, and on exit what they held before.

    Where a pipeline's weights came from is not known, so the patched ones are saved in host memory
    meanwhile; that takes as many bytes as they have.

    Raises:
        InputError: a patched weight is on meta, on a disk or quantized, or two components that are
            one module have different patches.
    """
    saved: list[tuple[Tensor, Tensor, Tensor | None]] = []
    try:
        for component, own in _once_a_module(components, patches).items():
            module = _plain(components[component])
            parameters = dict(module.named_parameters())
            on_disk, copies = tensors_on_disk(module), host_copies(module)
            for name, patch in own.items():
                parameter = parameters[name]
                _check_plain(component, name, parameter, id(parameter) in on_disk)
                copy = copies.get(id(parameter))
                with torch.inference_mode(False), torch.no_grad():
                    before = parameter.detach().to("cpu", copy=True)
                    merged = patch(before.to(torch.float32))
                    saved.append((parameter, before, copy))
                    _write(merged, parameter, copy)
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for patched, before, copy in saved:
                _write(before, patched, copy)


def _write(values: Tensor, parameter: Tensor, copy: Tensor | None) -> None:
    """Write them where the parameter is now, and into the copy that offloading gives back to it."""
    parameter.data.copy_(values)
    if copy is not None:
        copy.copy_(values)


def _once_a_module(
    components: Mapping[str, Any], patches: Mapping[str, Patches]
) -> dict[str, Patches]:
    """Patches of each module by the first of its names, so that none is patched twice."""
    first: dict[int, str] = {}
    for name, each in components.items():
        if not _is_module(each):
            continue
        other = first.setdefault(id(_plain(each)), name)
        if patches.get(name, {}) != patches.get(other, {}):
            raise InputError(
                f"the {other} and the {name} of this pipeline are one module, so a LoRA changes "
                "both or none; give it for both, or load the pipeline with two"
            )
    return {name: patches[name] for name in first.values() if name in patches}


def _check_plain(
    component: str, name: str, parameter: nn.Parameter, is_on_disk: bool = False
) -> None:
    if parameter.is_meta or is_on_disk:
        raise InputError(
            f"{name} of the {component} is not in memory (offloaded to a disk, or in turns), so no "
            "LoRA can be merged into it; load the pipeline without, or give its folder: "
            "generate(model=...)"
        )
    is_wide = parameter.is_floating_point() and parameter.dtype.itemsize > 1
    if not is_wide or not is_plain(parameter):
        raise InputError(
            f"{name} of the {component} is quantized ({type(parameter).__name__}, "
            f"{parameter.dtype}), so no LoRA can be merged into it; load the pipeline without"
        )


def _is_module(part: Any) -> bool:
    return isinstance(part, nn.Module)


def _plain(module: nn.Module) -> nn.Module:
    """The module itself if it was compiled."""
    own = getattr(module, "_orig_mod", module)
    assert isinstance(own, nn.Module)
    return own
