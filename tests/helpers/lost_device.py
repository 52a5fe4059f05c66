"""A simulated device loss: one error, after which every call of a device fails.

The errors are those of torch 2.13 for CUDA, with the advice that it adds to each. As on a real
device, clean-up fails too: freeing memory, synchronisation, statistics, copies, module hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

ADVICE = """
Search for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/cuda-runtime-api for more.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""

FIRST = "CUDA error: uncorrectable ECC error encountered"
#: What every call says after it: another text, which must not hide the first.
AFTER = "CUDA error: unspecified launch failure"


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Well until `die`; seen by operations of this thread and by modules' calls in all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_dead = False
        self.num_failed = 0

    def die(self, error: Exception | None = None) -> NoReturn:
        """Fail, now and for good."""
        self.is_dead = True
        raise error or torch.AcceleratorError(FIRST + ADVICE)

    def check(self, *_: Any, **__: Any) -> None:
        """Fail if it is dead."""
        if self.is_dead:
            self.num_failed += 1
            raise torch.AcceleratorError(AFTER + ADVICE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check()
        return func(*args, **(kwargs or {}))


@contextmanager
def dying_device() -> Iterator[Device]:
    """Within, everything goes on the device that is given."""
    device = Device()
    hook = register_module_forward_pre_hook(device.check)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty_cache", "synchronize", "max_memory_allocated", "mem_get_info"):
            patch.setattr(torch.cuda, name, device.check)
        try:
            with device:
                yield device
        finally:
            hook.remove()
