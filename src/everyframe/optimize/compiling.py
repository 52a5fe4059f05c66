"""torch.compile block by block, so that what was compiled can never be stale.

A block is compiled where it stands: its name, parameters and hooks stay. torch guards a graph by
the shapes, dtypes and plain values that it was made for, and takes weights as inputs; hooks it does
not guard unless told, and a hook is how a precision is raised and a kernel chosen, so it is told
here. Compilation needs a C++ compiler and takes minutes: only on demand. Read next: `tools`,
`put_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def run_as_written(module: nn.Module) -> bool:
    """Take compilation off every part of the module; whether any was compiled."""
    compiled = [part for part in module.modules() if part._compiled_call_impl is not None]
    for part in compiled:
        part._compiled_call_impl = None
    return bool(compiled)


def compile_blocks(
    module: nn.Module, names: Iterable[str], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the parts with these dotted names in place; the first call of each takes long."""
    # torch's switches are made at import, so type checkers see none of them.
    config: Any = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    for name in names:
        module.get_submodule(name).compile(backend=backend)
