"""Check for the C++ compiler that torch.compile needs. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys


def why_not() -> str | None:
    """What is missing for compilation on a CPU, with its install command; None if nothing."""
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
