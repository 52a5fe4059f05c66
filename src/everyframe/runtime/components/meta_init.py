"""Build modules on the meta device and count their elements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Held while a library makes a module, and during a dry run. In `from_pretrained`, diffusers and
#: transformers change for the whole process: the default dtype, `torch.nn.init`,
#: `Module.register_parameter`, `tie_weights`. Modules built or dry-run in another thread meanwhile
#: would have other dtypes and untied weights; two loads at once would leave changes behind.
BUILD_LOCK = threading.RLock()


def build_on_meta(build: Callable[[], ModuleT]) -> ModuleT:
    """Build a module on the meta device: shapes only, no memory allocated."""
    with BUILD_LOCK, torch.device("meta"), _SkipInit():
        return build()


class _SkipInit(TorchFunctionMode):
    """Skip `torch.nn.init` on meta tensors, which is half of the build time."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            tensor: Tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def count_elements(module: nn.Module) -> dict[str, int]:
    """Elements of each parameter and persistent buffer by name.

    A parameter with several names (T5's embedding) counts once.
    """
    once: dict[int, tuple[str, int]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), (name, tensor.numel()))
    return dict(once.values())
