"""Tensors of a pipeline's component, and its module when they come from a file of another form.

diffusers and transformers read a component's own folder (`loading.py`). A file that was given for
one component (`adapters.component_file`) is read by our strict loader, tensor by tensor, each in
the dtype of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from everyframe.checkpoints.patched_file import PatchedTensorFile
from everyframe.checkpoints.strict_load import check_strictly, load_strictly
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import PACKED, Precision
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder
from everyframe.diffusers_pipelines.files.component_classes import empty_component
from everyframe.diffusers_pipelines.library_patches import quiet_libraries
from everyframe.precision import quantization
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.islands import parameter_dtype
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.components.patchable import WeightTable, table_of_module
from everyframe.runtime.loading import fill


def tensor_files(part: ComponentFolder) -> tuple[TensorFile, ...]:
    """The tensors of a component by the names in its files; headers are read."""
    if part.tensors is not None:
        return (part.tensors,)
    return tuple(open_checkpoint(file) for file in part.weights)


class _JoinedFile(TensorFile):
    """The tensors of several files as those of one."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        owners = {name: file for file in files for name in file}
        super().__init__(files[0].source, {name: each.entry(name) for name, each in owners.items()})


def own_tensors(part: ComponentFolder) -> TensorFile:
    """All tensors of a component by the names in its files."""
    opened = tensor_files(part)
    return opened[0] if len(opened) == 1 else _JoinedFile(opened)


def module_table(part: ComponentFolder) -> WeightTable:
    """Parameters and persistent buffers of a component's module, built from its config."""
    with quiet_libraries():
        return table_of_module(build_on_meta(partial(empty_component, part)))


def load_from_file(part: ComponentFolder, precision: Precision) -> nn.Module:
    """Load a component from its tensors, with its patches, on the CPU in the plan's dtypes.

    Linear layers have eight bits, or the blocks of a GGUF file, where the plan says so. Peak memory
    is the module and one tensor.

    Raises:
        CheckpointError: the tensors are not those of the module.
    """
    from accelerate import init_empty_weights

    # As the libraries do: parameters on meta, tables that the module computes on the CPU.
    with quiet_libraries(), init_empty_weights(include_buffers=False):
        module: nn.Module = empty_component(part)
    tie = getattr(module, "tie_weights", None)
    if callable(tie):  # what accelerate puts on meta is no longer one parameter
        tie()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
        return torch_dtype(parameter_dtype(name, precision)) if name in parameters else own

    file = PatchedTensorFile(own_tensors(part), part.patches)
    rounded = {*quantization.rows(module, precision)}
    if precision.weight_dtype == PACKED:
        rounded = {name for name in rounded if name in file and file.packed_bytes(name)}
    unread = load_strictly(module, file, dtype=dtype_of, leave=rounded)
    cpu = torch.device("cpu")
    if rounded:
        # A row is rounded as its file has it, not as the plan's dtype would.
        left = {name: source for name, source in unread.items() if name in rounded}
        fill(module, precision, file, left, (cpu, cpu), ())
    return module


def has_own_names(part: ComponentFolder) -> bool:
    """Whether the names in the component's files are those of its module."""
    with quiet_libraries():
        module: nn.Module = build_on_meta(partial(empty_component, part))
    try:
        check_strictly(module, own_tensors(part))
    except CheckpointError:
        return False
    return True
