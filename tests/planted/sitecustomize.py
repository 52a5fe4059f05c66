"""Kills the worker process that it is put into: ``PLANTED=SIGFPE:Attention:3`` in the environment.

Python imports this by itself where its folder is in PYTHONPATH. ``PLANTED_RANK=1`` is for that rank
under torchrun alone. The signal comes when a module of
that class is called for that time, as it would from a broken library that the module calls.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

is_meant = os.environ.get("PLANTED_RANK") in (None, os.environ.get("RANK"))
if os.environ.get("PLANTED") and is_meant and "everyframe.engine.worker" in sys.orig_argv:
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    name, kind, times = os.environ["PLANTED"].split(":")
    left = int(times)

    def die(module: Any, given: Any, answer: Any) -> None:
        """Die if it is the turn of this call."""
        global left
        # A dry run has no numbers, and breaks on no library.
        is_real = any(type(each) is torch.Tensor and not each.is_meta for each in given)
        if type(module).__name__ == kind and is_real:
            left -= 1
            if not left:
                os.kill(os.getpid(), getattr(signal, name))

    register_module_forward_hook(die)
