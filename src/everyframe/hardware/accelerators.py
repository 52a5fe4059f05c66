"""Accelerators that torch finds: CUDA and ROCm GPUs, and Apple's MPS.

torch is imported inside the functions, and nothing is computed on a device. A CUDA context takes
hundreds of MB of the GPU, so free memory comes from nvidia-smi; only without it is the driver asked
through torch, which creates a context. What the context of this process will take isn't free.
"""

from __future__ import annotations

import platform

from everyframe.core.facts import DeviceFacts
from everyframe.hardware.cpu import output_of
from everyframe.hardware.device_loss import translate_device_loss

#: First CUDA capability with bf16 matrix instructions. `torch.cuda.is_bf16_supported()` is not
#: used: by default it also accepts older GPUs, which emulate bf16.
BF16_CAPABILITY = (8, 0)

#: Floating dtypes of Apple's GPUs: Metal has no float64 (torch raises an error), and bfloat16 needs
#: macOS 14 (torch checks the version).
MPS_DTYPES = ("float32", "float16")
_MPS_BF16_MACOS = 14

#: Largest array that MPSGraph addresses, in bytes; a larger one aborts the process.
MPS_MAX_ARRAY_BYTES = 1 << 32

#: Capabilities before tensor cores (7.0) with fp16 arithmetic faster than float32.
_FAST_FP16_BEFORE_7 = ((5, 3), (6, 0), (6, 2))

#: Bytes that a process takes of an NVIDIA GPU beside its tensors: kernels, the workspaces of cuBLAS
#: and cuDNN, and a stack for each thread that can be resident. Measured with torch 2.11: 740 to
#: 890 MB on cards with 132 multiprocessors, whose 270,336 stacks of 1 KiB are 277 MB of them.
CUDA_PROCESS_BYTES, STACK_BYTES = 613 * 10**6, 1024

#: First ROCm architectures with bf16 matrix instructions, by prefix of the name.
_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def may_have_any(torch_version: str) -> bool:
    """Whether this torch build supports any accelerator (CPU wheels do not)."""
    return bool(torch_version) and not torch_version.endswith("+cpu")


def has_fast_bf16(capability: tuple[int, int]) -> bool:
    """Whether CUDA GPUs of this capability multiply bf16 in hardware."""
    return capability >= BF16_CAPABILITY


def has_fast_fp16(capability: tuple[int, int]) -> bool:
    """Whether CUDA GPUs of this capability multiply fp16 faster than float32."""
    return capability >= (7, 0) or capability in _FAST_FP16_BEFORE_7


def accelerator_facts() -> tuple[DeviceFacts, ...]:
    """Accelerators in torch's order: CUDA or ROCm GPUs, then MPS."""
    import torch

    devices: list[DeviceFacts] = []
    if torch.cuda.is_available():
        free_by_uuid = _free_by_uuid() if torch.version.hip is None else {}
        for index in range(torch.cuda.device_count()):
            with translate_device_loss(f"cuda:{index}", "before it was used"):
                devices.append(_cuda_card(index, free_by_uuid))
    if torch.backends.mps.is_available():
        devices.append(_mps())
    return tuple(devices)


def accelerator_versions() -> dict[str, str]:
    """Versions of the accelerator libraries that this torch has."""
    import torch

    found = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    return {name: str(version) for name, version in found.items() if version is not None}


def _cuda_card(index: int, free_by_uuid: dict[str, int]) -> DeviceFacts:
    import torch

    card = torch.cuda.get_device_properties(index)
    free = free_by_uuid.get(_bare_uuid(str(getattr(card, "uuid", ""))))
    if free is None:
        free, _ = torch.cuda.mem_get_info(index)
    elif not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
        resident = card.multi_processor_count * card.max_threads_per_multi_processor
        free = max(0, free - CUDA_PROCESS_BYTES - STACK_BYTES * resident)
    if torch.version.hip is not None:
        # gfx numbers are not CUDA capabilities: a Vega (no bf16) and an MI200 (bf16) are both 9.0.
        arch = str(card.gcnArchName)
        return DeviceFacts(
            name=f"{card.name} ({arch})",
            kind="cuda",
            index=index,
            memory=card.total_memory,
            free_memory=min(free, card.total_memory),
            has_fast_bf16=arch.startswith(_ROCM_BF16),
            has_fast_fp16=True,
        )
    capability = (card.major, card.minor)
    return DeviceFacts(
        name=card.name,
        kind="cuda",
        index=index,
        memory=card.total_memory,
        free_memory=min(free, card.total_memory),
        capability=capability,
        has_fast_bf16=has_fast_bf16(capability),
        has_fast_fp16=has_fast_fp16(capability),
    )


def _mps() -> DeviceFacts:
    import torch

    total = int(torch.mps.recommended_max_memory())
    return DeviceFacts(
        name="Apple GPU",
        kind="mps",
        index=None,
        memory=total,
        free_memory=max(0, total - int(torch.mps.driver_allocated_memory())),
        has_fast_bf16=False,
        has_fast_fp16=True,
        dtypes=MPS_DTYPES + (("bfloat16",) if _macos_major() >= _MPS_BF16_MACOS else ()),
        max_array_bytes=MPS_MAX_ARRAY_BYTES,
    )


def _macos_major() -> int:
    major = platform.mac_ver()[0].partition(".")[0]
    return int(major) if major.isdigit() else 0


def _free_by_uuid() -> dict[str, int]:
    """Free bytes of each NVIDIA GPU by bare UUID; empty without a working nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    return _parse_free(output_of(command))


def _parse_free(text: str) -> dict[str, int]:
    """Parse lines ``GPU-<uuid>, <MiB>`` of nvidia-smi; GPUs that report no number are left out."""
    free = {}
    for line in text.splitlines():
        uuid, _, mebibytes = line.partition(",")
        if mebibytes.strip().isdigit():
            free[_bare_uuid(uuid)] = int(mebibytes) << 20
    return free


def _bare_uuid(uuid: str) -> str:
    return uuid.strip().casefold().removeprefix("gpu-")
