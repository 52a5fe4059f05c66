"""Tensors of a pipeline's component, and its module when they come from a file of another form.

diffusers and transformers read a component's own folder (`loading.py`). A file that was given for
one component (`adapters.component_file`) is read by our strict loader, tensor by tensor, each in
the dtype of the plan.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from everyframe.checkpoints.patched_file import PatchedTensorFile
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.plan import Precision
from everyframe.diffusers_pipelines.checkpoint import ComponentFolder
from everyframe.diffusers_pipelines.component_classes import empty_component
from everyframe.diffusers_pipelines.library_patches import quiet_libraries
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.islands import parameter_dtype
from everyframe.runtime.meta_init import build_on_meta
from everyframe.runtime.patchable import WeightTable, table_of_module


def tensor_files(part: ComponentFolder) -> tuple[TensorFile, ...]:
    """The tensors of a component by the names in its files; headers are read."""
    if part.tensors is not None:
        return (part.tensors,)
    return tuple(open_checkpoint(file) for file in part.weights)


def module_table(part: ComponentFolder) -> WeightTable:
    """Parameters and persistent buffers of a component's module, built from its config."""
    with quiet_libraries():
        return table_of_module(build_on_meta(partial(empty_component, part)))


def load_from_file(part: ComponentFolder, precision: Precision) -> nn.Module:
    """Load a component from its own file, with its patches, on the CPU in the plan's dtypes.

    Peak memory is the module and one tensor.

    Raises:
        CheckpointError: the tensors are not those of the module.
    """
    from accelerate import init_empty_weights

    assert part.tensors is not None
    # As the libraries do: parameters on meta, tables that the module computes on the CPU.
    with quiet_libraries(), init_empty_weights(include_buffers=False):
        module: nn.Module = empty_component(part)
    tie = getattr(module, "tie_weights", None)
    if callable(tie):  # what accelerate puts on meta is no longer one parameter
        tie()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
        return torch_dtype(parameter_dtype(name, precision)) if name in parameters else own

    load_strictly(module, PatchedTensorFile(part.tensors, part.patches), dtype=dtype_of)
    return module
