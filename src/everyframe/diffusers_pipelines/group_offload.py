"""Weights that diffusers' group offloading holds elsewhere: in files, or in copies in host memory.

Between two calls a tensor that is offloaded to a disk has memory without its values. With streams,
each offload gives a tensor the copy of it that the group holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def _groups(module: nn.Module) -> Iterator[Any]:
    """The groups that the hooks of the module and of its submodules load and offload."""
    for each in module.modules():
        hooks = getattr(getattr(each, "_diffusers_hook", None), "hooks", {})
        yield from (hook.group for hook in hooks.values() if hasattr(hook, "group"))


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
