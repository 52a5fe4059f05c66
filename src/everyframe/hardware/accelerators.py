"""What torch sees beside the CPU: CUDA and ROCm cards, and Apple's MPS.

torch is imported inside the functions. Not here: any computation on a device. A CUDA context takes
hundreds of MB of the card, so free memory is asked of nvidia-smi; only where that is not to be had
is the driver asked through torch, which makes a context. Read next: `everyframe.hardware.facts`.
"""

from __future__ import annotations

import platform
import subprocess

from everyframe.core.facts import DeviceFacts
from everyframe.hardware.device_loss import translate_device_loss

#: The first CUDA capability with bf16 matrix instructions. `torch.cuda.is_bf16_supported()` is not
#: asked: by default it says yes to older cards too, which emulate it.
BF16_CAPABILITY = (8, 0)

#: Floating dtypes of Apple's GPUs: Metal has no float64 (torch refuses it by name), and bfloat16
#: came with macOS 14 (torch asks for that version).
MPS_DTYPES = ("float32", "float16")
_MPS_BF16_MACOS = 14

#: MPSGraph addresses arrays up to this many bytes; larger ones abort the process.
MPS_MAX_ARRAY_BYTES = 1 << 32

#: Capabilities below tensor cores (7.0) whose fp16 arithmetic is faster than their float32.
_FAST_FP16_BEFORE_7 = ((5, 3), (6, 0), (6, 2))

#: The first ROCm architectures with bf16 matrix instructions, by the start of their name.
_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def may_have_any(torch_version: str) -> bool:
    """Whether a torch of that version can drive an accelerator at all (the CPU's wheels can't)."""
    return bool(torch_version) and not torch_version.endswith("+cpu")


def has_fast_bf16(capability: tuple[int, int]) -> bool:
    """Whether CUDA cards of that capability multiply bf16 in hardware."""
    return capability >= BF16_CAPABILITY


def has_fast_fp16(capability: tuple[int, int]) -> bool:
    """Whether CUDA cards of that capability multiply fp16 faster than float32."""
    return capability >= (7, 0) or capability in _FAST_FP16_BEFORE_7


def accelerator_facts() -> tuple[DeviceFacts, ...]:
    """The accelerators in torch's order: CUDA or ROCm cards, then MPS."""
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
    """Versions of the libraries that compute on the accelerators, those that torch has."""
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
    if torch.version.hip is not None:
        # gfx numbers are no CUDA capabilities: 9.0 is a Vega without bf16 and an MI200 with it.
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
    """Free bytes of each NVIDIA card by its bare UUID; empty without a working nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return _parse_free(done.stdout) if done.returncode == 0 else {}


def _parse_free(text: str) -> dict[str, int]:
    """Lines ``GPU-<uuid>, <MiB>`` of nvidia-smi; a card that doesn't tell is left out."""
    free = {}
    for line in text.splitlines():
        uuid, _, mebibytes = line.partition(",")
        if mebibytes.strip().isdigit():
            free[_bare_uuid(uuid)] = int(mebibytes) << 20
    return free


def _bare_uuid(uuid: str) -> str:
    return uuid.strip().casefold().removeprefix("gpu-")
