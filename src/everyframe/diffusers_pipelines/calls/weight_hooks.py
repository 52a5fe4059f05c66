"""Weights that hooks of diffusers and accelerate set: from files, from copies, in another dtype.

Between two calls a tensor that group offloading has on a disk has memory without its values. With
streams, each offload gives a tensor the copy of it that the group holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from everyframe.diffusers_pipelines.calls.step_caches import hook_registries


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


def why_not_widened(module: nn.Module) -> str:
    """What sets the weights again in each call, so that no wider ones stay; empty if nothing does.

    Weights that move between devices keep the dtype that they have.
    """
    if any(name == "layerwise_casting" for name, _ in _hooks(module)):
        return (
            "enable_layerwise_casting casts its weights in each call; give it a wider compute_dtype"
        )
    if tensors_on_disk(module):
        return "group offloading reads its weights from a disk in each call; offload without"
    if host_copies(module):
        return "group offloading has copies of its weights; offload without use_stream"
    hooks = [hook for each in module.modules() if (hook := getattr(each, "_hf_hook", None))]
    hooks += [inner for hook in hooks for inner in getattr(hook, "hooks", ())]
    if any(getattr(hook, "offload", False) for hook in hooks):
        return "sequential offloading sets its weights in each call; use enable_model_cpu_offload"
    return ""
