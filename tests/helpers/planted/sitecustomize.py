"""Plant a fault in a worker process: ``PLANTED=SIGFPE:Attention:3``.

Python imports this module automatically if its folder is in PYTHONPATH. The example raises SIGFPE
at the third call of a module of class `Attention`, as a broken library under it would.
``PLANTED_RANK=1`` limits the fault to that rank. In place of the signal:

- ``hang``: the call never returns.
- ``memory``: from this call on, more than one sample at a time is out of memory.
- ``lost``: this call and every later one raise torch's error of a lost device.
- ``watchdog``: prints that the device is lost and aborts, as NCCL does.
- ``disk:.safetensors:20``: a slow disk; the first tensor of such a file takes 20 idle seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

wanted = os.environ.get("PLANTED_RANK")
is_worker = any("everyframe.engine.workers.worker" in word for word in sys.orig_argv)
if os.environ.get("PLANTED") and is_worker:
    import torch
    import torch.distributed as dist
    from torch.nn.modules.module import register_module_forward_hook

    name, kind, times = os.environ["PLANTED"].split(":")
    left = int(times)
    is_dead = False

    def is_meant() -> bool:
        """Whether this is the rank; known once ranks have met."""
        return wanted is None or (dist.is_initialized() and dist.get_rank() == int(wanted))

    def die(module: Any, given: Any, answer: Any) -> None:
        """Die if it is the turn of this call."""
        global left, is_dead
        if is_dead:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        # A dry run has no numbers, and breaks on no library.
        is_real = any(type(each) is torch.Tensor and not each.is_meta for each in given)
        if type(module).__name__ == kind and is_real:
            left -= 1
            if name == "memory":
                if left <= 0 and len(given[0]) > 1 and is_meant():
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            elif not left and is_meant():
                if name == "hang":
                    time.sleep(600)
                if name == "lost":
                    is_dead = True
                    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
                if name == "watchdog":
                    message = (
                        "Process group watchdog: CUDA error: an illegal memory access was seen"
                    )
                    print("terminate called\n  what(): ", message, file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGABRT)
                os.kill(os.getpid(), getattr(signal, name))

    register_module_forward_hook(die)

    opened = Path.open

    def open_slowly(path: Path, *args: Any, **kwargs: Any) -> Any:
        """Tensors alone are read without a buffer."""
        global left
        if left and path.suffix == kind and kwargs.get("buffering") == 0 and is_meant():
            seconds, left = left, 0
            time.sleep(seconds)
        return opened(path, *args, **kwargs)

    if name == "disk":
        Path.open = open_slowly  # type: ignore[method-assign]
