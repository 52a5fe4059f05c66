"""Software facts: operating system, packages, driver, CPU instructions, environment variables.

Nothing here imports torch at module level, so the facts are available even if torch cannot be
imported. `with_loaded` adds the libraries that torch has loaded, in a process that imports it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from everyframe.core.facts import SoftwareFacts
from everyframe.hardware.cpu import output_of, processor_flags

#: Packages that change results, or that known issues are about. Names that begin with ``nvidia-``
#: are included too.
PACKAGES = (
    "torch", "torchvision", "triton", "triton-windows", "pytorch-triton-rocm", "diffusers",
    "transformers", "accelerate", "safetensors", "numpy", "av",
    "flash-attn", "flash-attn-3", "xformers", "sageattention", "apex", "bitsandbytes",
    "torch-npu", "intel-extension-for-pytorch", "xfuser",
    "oneflow", "onediff", "onediffx", "nexfort", "imaginairy", "opensora", "everyframe",
)  # fmt: skip

#: Variables that change the result, the kernel or the speed.
_PREFIXES = (
    "ONEFLOW_", "NEXFORT_", "ONEDIFF_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "TORCH",
    "PYTORCH_", "NCCL_", "GLOO_", "MIOPEN_", "HSA_", "HIP_", "ROCR_", "ROCBLAS_", "MKL_", "OMP_",
    "KMP_", "ATEN_", "DNNL_", "ONEDNN_", "XFORMERS_", "SAGE", "TRITON_", "EVERYFRAME_",
    "ZE_", "IGC_", "OverrideDefaultFP64Settings",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "HF_HUB_OFFLINE")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def software_facts() -> SoftwareFacts:
    """Software facts of this machine that need no torch."""
    return SoftwareFacts(
        system=_system(),
        system_version=platform.mac_ver()[0] if sys.platform == "darwin" else platform.release(),
        python=platform.python_version(),
        packages=_packages(),
        driver=driver_version(),
        cpu_flags=tuple(sorted(processor_flags())),
        environment=variables_that_matter(os.environ),
    )


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that can change a result; none whose name suggests a secret."""
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


def driver_version() -> str | None:
    """Version of the NVIDIA driver from the kernel, else from nvidia-smi; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return _driver_by_smi()
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else _driver_by_smi()


def _driver_by_smi() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = re.match(r"\d+(\.\d+)+", output_of(command))
    return found[0] if found else None


#: Library -> pattern of its file name. The engine files beside cuDNN's main library have its
#: version.
_FILES = {
    "cublas": r"libcublas\.so[.\d]*|cublas64_\d+\.dll",
    "cublaslt": r"libcublasLt\.so[.\d]*|cublasLt64_\d+\.dll",
    "cudnn": r"libcudnn\.so[.\d]*|cudnn64_\d+\.dll",
    "nccl": r"libnccl\.so[.\d]*",
    "hipblas": r"libhipblas\.so[.\d]*",
    "miopen": r"libMIOpen\.so[.\d]*",
}


def with_loaded(software: SoftwareFacts) -> SoftwareFacts:
    """Add torch's build targets and the libraries that it loads. Imports torch."""
    import torch

    paths = loaded_files(_maps())
    # These may be None by Python's stubs.
    cuda, rocm = torch.version.cuda, torch.version.hip
    return replace(
        software,
        libraries=loaded_versions(),
        copies={name: tuple(found) for name, found in paths.items() if len(found) > 1},
        cuda=cuda,
        rocm=rocm,
        architectures=tuple(torch.cuda.get_arch_list()) if cuda or rocm else (),
    )


def loaded_versions() -> dict[str, str]:
    """Library -> version, for those loaded in this process."""
    paths = loaded_files(_maps())
    versions = {name: _version(name, found[0]) for name, found in paths.items()}
    return {name: version for name, version in versions.items() if version}


def loaded_files(maps: str) -> dict[str, list[str]]:
    """Library -> its files in a ``/proc/self/maps``, by address."""
    found: dict[str, list[str]] = {}
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5:]
        if not path:
            continue
        for name, pattern in _FILES.items():
            files = found.setdefault(name, [])
            if re.fullmatch(pattern, os.path.basename(path[0])) and path[0] not in files:
                files.append(path[0])
    return {name: files for name, files in found.items() if files}


def _maps() -> str:
    """Memory map of this process; empty if the system has none."""
    if not sys.platform.startswith("linux"):
        return ""
    return Path("/proc/self/maps").read_text(errors="replace")


def _version(name: str, path: str) -> str | None:
    """Version that the library reports, completed from pip if both agree.

    cuBLAS reports three numbers of four, and known issues depend on the fourth too.
    """
    ask = _ASK.get(name)
    reported = ask(path) if ask else None
    if reported is None:
        return None
    for listed in _listed_around(path):
        if Version(listed).release[:3] == Version(reported).release[:3]:
            return listed
    return reported


def _cublas_version(path: str) -> str | None:
    library, number = ctypes.CDLL(path), ctypes.c_int()
    numbers = []
    for which in range(3):
        if library.cublasGetProperty(which, ctypes.byref(number)) != 0:
            return None
        numbers.append(str(number.value))
    return ".".join(numbers)


def _cublaslt_version(path: str) -> str:
    library = ctypes.CDLL(path)
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return dotted(int(library.cublasLtGetVersion()), 10000)


def _cudnn_version(path: str) -> str:
    library = ctypes.CDLL(path)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = int(library.cudnnGetVersion())
    # 8907 is 8.9.7 and 91002 is 9.10.2: the first number moved up in version 9.
    return dotted(number, 10000 if number >= 90000 else 1000)


def _nccl_version(path: str) -> str | None:
    library, number = ctypes.CDLL(path), ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    return dotted(number.value, 10000)


_ASK: dict[str, Callable[[str], str | None]] = {
    "cublas": _cublas_version,
    "cublaslt": _cublaslt_version,
    "cudnn": _cudnn_version,
    "nccl": _nccl_version,
}


def dotted(number: int, first: int) -> str:
    """``9.10.2`` for 91002, where the first part counts `first` and the second 100."""
    return f"{number // first}.{number % first // 100}.{number % 100}"


def _listed_around(path: str) -> Iterator[str]:
    """Versions of the ``nvidia`` packages whose folder contains this file."""
    parts = Path(path).parts
    if "nvidia" not in parts:
        return
    folder = parts[parts.index("nvidia") + 1]
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(rf"nvidia-{re.escape(folder)}(-cu\d+)?", name):
            yield distribution.version
