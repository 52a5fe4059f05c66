"""torch.compile block by block, so that what was compiled can never be stale.

A block is compiled where it stands: its name, parameters and hooks stay. torch guards a graph by
the shapes, dtypes and plain values that it was made for, and takes weights as inputs; hooks it does
not guard unless told, and a hook is how a precision is raised and a kernel chosen, so it is told
here. Compilation needs a C++ compiler and takes minutes: only on demand. Read next: `put_on`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def why_not() -> str | None:
    """What is missing for compiling on a CPU, and the command that brings it; None if nothing."""
    if sys.platform == "win32":
        return (
            None if shutil.which("cl") else "no C++ compiler: install Visual Studio's build tools"
        )
    wanted = os.environ.get("CXX") or "g++"
    if shutil.which(wanted) or shutil.which("clang++"):
        return None
    if sys.platform == "darwin":
        return "no C++ compiler: xcode-select --install"
    return f"no C++ compiler ({wanted}): apt install g++, or name another one in CXX"


def compile_blocks(module: nn.Module, names: Iterable[str], backend: str = "inductor") -> None:
    """Compile the parts with these dotted names in place; the first call of each takes long."""
    # torch's switches are made at import, so type checkers see none of them.
    config: Any = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    for name in names:
        module.get_submodule(name).compile(backend=backend)
