"""Planted out-of-memory errors: torch's message, and the place where it is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

#: As torch's CPU allocator says it.
TOO_LITTLE = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GB"


@contextmanager
def before_calls(look: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Within, ``look(module, args)`` is called before every call of a module, and may raise."""
    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
