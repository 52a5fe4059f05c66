"""Weights that are not plain numbers between calls: in files, copies, another dtype, or quantized.

Hooks of diffusers and accelerate set them, or tensors of a quantizer's own class hold them.

Between two calls a tensor that group offloading has on a disk has memory without its values. With
streams, each offload gives a tensor the copy of it that the group holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from everyframe.diffusers_pipelines.calls.step_caches import hook_registries
from everyframe.precision.plain_tensors import is_plain

#: What sets the weights of single layers in each call.
LAYERWISE, SEQUENTIAL = "enable_layerwise_casting", "sequential offloading"


def _hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, hook) of diffusers' hooks of the module and of its submodules."""
    for registry in hook_registries(module):
        yield from registry.hooks.items()


def _groups(module: nn.Module) -> Iterator[Any]:
    """The groups that these hooks load and offload."""
    yield from (hook.group for _, hook in _hooks(module) if hasattr(hook, "group"))


def tensors_on_disk(module: nn.Module) -> set[int]:
    """Ids of the parameters and buffers whose values are in files."""
    return {
        id(tensor) for group in _groups(module) for tensor in getattr(group, "tensor_to_key", ())
    }


def host_copies(module: nn.Module) -> dict[int, Tensor]:
    """Id of a parameter or buffer -> the copy that its group gives back to it."""
    return {
        id(tensor): copy
        for group in _groups(module)
        for tensor, copy in group.cpu_param_dict.items()
    }


def weights_set_by(module: nn.Module) -> str:
    """What moves or casts weights layer by layer in each call, by its name; empty if nothing does.

    It knows the layers that it was given: one in place of another is left out.
    """
    if any(name == "layerwise_casting" for name, _ in _hooks(module)):
        return LAYERWISE
    if any(True for _ in _groups(module)):
        return "group offloading"
    hooks = [hook for each in module.modules() if (hook := getattr(each, "_hf_hook", None))]
    hooks += [inner for hook in hooks for inner in getattr(hook, "hooks", ())]
    has_offload = any(getattr(hook, "offload", False) for hook in hooks)
    return SEQUENTIAL if has_offload else ""


def why_not_widened(module: nn.Module) -> str:
    """Why the weights can't be wider: quantized, or set again in each call; empty if they can.

    Weights that move between devices keep the dtype that they have.
    """
    quantized = sorted({type(each).__name__ for each in module.parameters() if not is_plain(each)})
    if quantized:
        return f"its weights are quantized ({', '.join(quantized)}); load it without"
    by = weights_set_by(module)
    if by == LAYERWISE:
        return f"{by} casts its weights in each call; give it a wider compute_dtype"
    if by == SEQUENTIAL:
        return f"{by} sets its weights in each call; use enable_model_cpu_offload"
    if tensors_on_disk(module):
        return f"{by} reads its weights from a disk in each call; offload without"
    if host_copies(module):
        return f"{by} has copies of its weights; offload without use_stream"
    return ""
