"""What is around the devices: system, packages, driver, processor's instructions, variables.

Nothing here imports torch, so it answers where torch can't even be imported. What torch has really
loaded is added by `loaded`, in a process that has imported it. Read next: `everyframe.core.facts`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from everyframe.core.facts import SoftwareFacts
from everyframe.hardware.processor import processor_flags

#: Packages that change what comes out, or that known issues are about. What begins with ``nvidia-``
#: counts too.
PACKAGES = (
    "torch", "torchvision", "triton", "triton-windows", "pytorch-triton-rocm", "diffusers",
    "transformers", "accelerate", "safetensors", "numpy", "av",
    "flash-attn", "flash-attn-3", "xformers", "sageattention", "apex", "bitsandbytes",
    "torch-npu", "intel-extension-for-pytorch", "xfuser",
    "oneflow", "onediff", "onediffx", "nexfort", "imaginairy", "opensora", "everyframe",
)  # fmt: skip

#: Variables that change what is computed, by which kernel, or how fast.
_PREFIXES = (
    "ONEFLOW_", "NEXFORT_", "ONEDIFF_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "TORCH",
    "PYTORCH_", "NCCL_", "GLOO_", "MIOPEN_", "HSA_", "HIP_", "ROCR_", "ROCBLAS_", "MKL_", "OMP_",
    "KMP_", "ATEN_", "DNNL_", "ONEDNN_", "XFORMERS_", "SAGE", "TRITON_", "EVERYFRAME_",
    "ZE_", "IGC_", "OverrideDefaultFP64Settings",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "HF_HUB_OFFLINE")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def software_facts() -> SoftwareFacts:
    """The facts of this machine that need no torch."""
    return SoftwareFacts(
        system=_system(),
        system_version=_system_version(),
        python=platform.python_version(),
        packages=_packages(),
        driver=driver_version(),
        cpu_flags=tuple(sorted(processor_flags())),
        environment=variables_that_matter(os.environ),
    )


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of these variables that can change a result; none whose name speaks of a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
    }


def _packages() -> dict[str, str]:
    found = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name not in found and (name in PACKAGES or name.startswith("nvidia-")):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _system() -> str:
    if sys.platform == "darwin":
        return "macos"
    if sys.platform == "win32":
        return "windows"
    return "wsl" if "microsoft" in platform.release().casefold() else "linux"


def _system_version() -> str:
    return platform.mac_ver()[0] if sys.platform == "darwin" else platform.release()


def driver_version() -> str | None:
    """NVIDIA's driver by the kernel's own word, else by nvidia-smi; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return _driver_by_smi()
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else _driver_by_smi()


def _driver_by_smi() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+(\.\d+)+", done.stdout.strip())
    return found[0] if done.returncode == 0 and found else None
