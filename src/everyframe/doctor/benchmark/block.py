"""Synthetic blocks: a spatial and a temporal block of Open-Sora 1.2's released width.

They run as in a denoising step of a plan, with both guidance branches. All weights are one number,
so nothing has to be downloaded. Time, memory and fast paths are measured in separate processes, and
compared with the forecast of the dry run.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision, Settings

if TYPE_CHECKING:
    from torch import nn

    from everyframe.dry_run.call import DryRunCall

#: Sizes from small to large: (height, width, frames).
SIZES = ((256, 256, 17), (360, 640, 51), (720, 1280, 51))

COMPONENT = "denoiser"
_TEXT = {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2,
         "num_layers": 1, "vocab_size": 40}  # fmt: skip
_OPTIONS = (("aesthetic", None), ("motion_score", None), ("camera_motion", None),
            ("truncate_prompt", False))  # fmt: skip
_ROUNDS = 3
#: glibc's M_MMAP_THRESHOLD: blocks from this size on are given back to the system at once.
_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20


def step_call(size: tuple[int, int, int]) -> DryRunCall:
    """One step of the blocks at (height, width, frames)."""
    from everyframe.families.opensora.checkpoint import OpenSoraFiles
    from everyframe.families.opensora.components import OpenSoraBuilder
    from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config
    from everyframe.families.opensora.options import OpenSoraOptions
    from everyframe.families.opensora.spec import OpenSoraSpec
    from everyframe.families.opensora.vae_config import VideoVAEConfig
    from everyframe.runtime.components.component_files import ComponentSource

    config = OpenSoraConfig("1.2", STDiT3Config(depth=1), VideoVAEConfig(), _TEXT)
    nowhere = dict.fromkeys(OpenSoraFiles.table, ComponentSource("nowhere", None))
    files = OpenSoraFiles(nowhere, "1.2")
    spec = OpenSoraSpec("bench", "bench", OpenSoraOptions(), files, OpenSoraBuilder(config))
    height, width, num_frames = size
    settings = Settings("a", None, height, width, num_frames, 24.0, 30, 7.0, 0, options=_OPTIONS)
    calls = spec.dry_run_calls(settings)
    return next(call for call in calls if call.component == COMPONENT)


def describe_work(size: tuple[int, int, int]) -> str:
    """Description of the work; only results of equal work are compared."""
    height, width, num_frames = size
    return f"Open-Sora 1.2, 1+1 of 28+28 blocks, {width}x{height}, {num_frames} frames"


def measure_memory(
    size: tuple[int, int, int], precision: Precision, device: DeviceFacts, num_threads: int
) -> int | None:
    """Peak bytes of the first step beyond the memory before it; None if not reported."""
    import torch

    from everyframe.hardware.cpu import cpu_threads

    with cpu_threads(num_threads), torch.inference_mode():
        # A small size first, to warm up imports and libraries.
        for each in (SIZES[0], size):
            if device.kind == "cuda":
                torch.cuda.reset_peak_memory_stats(device.torch_name)
                before = torch.cuda.memory_allocated(device.torch_name)
            elif _reset_peak():
                before = _status("VmRSS")
            else:
                return None
            call = step_call(each)
            call.call({COMPONENT: built(call, precision, None, device.torch_name)},
                      device.torch_name)  # fmt: skip
        if device.kind == "cuda":
            return torch.cuda.max_memory_allocated(device.torch_name) - before
        return _status("VmHWM") - before


def measure_seconds(
    size: tuple[int, int, int], precision: Precision, paths: tuple[str, ...], device: str,
    num_threads: int,
) -> tuple[float, float]:  # fmt: skip
    """Median seconds of a step with plain torch and with these fast paths, measured in turns."""
    import torch

    from everyframe.hardware.cpu import cpu_threads
    from everyframe.hardware.throughput import wait_for_device
    from everyframe.precision.strict_float32 import strict_float32

    call = step_call(size)
    taken: tuple[list[float], list[float]] = ([], [])
    with cpu_threads(num_threads), torch.inference_mode(), strict_float32():
        modules = [built(call, precision, each, device) for each in ((), paths)]
        for number in range(_ROUNDS + 1):
            for module, seconds in zip(modules, taken, strict=True):
                wait_for_device(device)
                began = time.perf_counter()
                call.call({COMPONENT: module}, device)
                wait_for_device(device)
                if number:  # the first one warms up
                    seconds.append(time.perf_counter() - began)
    return statistics.median(taken[0]), statistics.median(taken[1])


def built(
    call: DryRunCall, precision: Precision, paths: tuple[str, ...] | None, device: str
) -> nn.Module:
    """Build the module on the device, with this precision and these fast paths; None is none."""
    import copy

    from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
    from everyframe.precision.cast_hooks import add_cast_hooks

    module: nn.Module = copy.deepcopy(call.module())
    swap_modules(module, paths)
    # On meta, so that no wider copy of the weights counts.
    add_cast_hooks(module, precision, call.outputs(COMPONENT, module))
    module.to_empty(device=device).eval().requires_grad_(False)
    for each in (*module.parameters(), *module.buffers()):
        each.fill_(1e-3) if each.is_floating_point() else each.zero_()
    apply_fast_paths(module, paths)
    return module


def _reset_peak() -> bool:
    """Have Linux count the peak from here; whether it does."""
    import ctypes

    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    libc = ctypes.CDLL(None)
    return bool(getattr(libc, "mallopt", lambda *_: 0)(_MMAP_THRESHOLD, _MAPPED_BYTES)) and (
        sys.platform == "linux"
    )


def _status(name: str) -> int:
    """Bytes of one line of what Linux reports of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
