"""Probes of speed, the compiler and extensions.

An emulated dtype shows by its time: it is slower than the dtype that it replaces.
"""

from __future__ import annotations

import time
from importlib import import_module, util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.doctor.probes import outcome
from everyframe.doctor.probes.arithmetic import dtypes_of
from everyframe.numerics.tensor_stats import largest_error
from everyframe.precision.dtypes import dtype_name


def bf16(device: str) -> dict[str, Any]:
    """Time a product in every dtype, and report whether bf16 is slower than float32."""
    size = 384 if torch.device(device).type == "cpu" else 4096
    seconds = {}
    # bf16 even if runs don't use it: the probe checks whether it is emulated.
    for dtype in dict.fromkeys((*dtypes_of(device), torch.bfloat16)):
        try:
            seconds[dtype_name(dtype)] = _product(size, device, dtype)
        except (RuntimeError, TypeError) as error:
            return outcome(skipped=f"no products in {dtype_name(dtype)}: {str(error)[:120]}")
    ratio = seconds["bfloat16"] / seconds["float32"]
    return outcome(seconds=seconds, bf16_over_float32=ratio)


def _product(size: int, device: str, dtype: torch.dtype) -> float:
    """The minimum of five times; other load can only add to it."""
    x = torch.randn(size, size).to(device, dtype)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        y = x @ x
        y[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times[1:])


def compile_kernel(device: str) -> dict[str, Any]:
    """A compiled fused normalisation and gate, against float64."""

    def kernel(x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * F.silu(F.layer_norm(x, (64,)))

    torch.manual_seed(0)
    x, gate = torch.randn(8, 64), torch.randn(8, 64)
    want = kernel(x.double(), gate.double())
    got = torch.compile(kernel)(x.to(device), gate.to(device))
    error = largest_error(got, want).relative
    wrong = [] if error <= 1e-5 else [f"a compiled kernel is off by {error:.1e}"]
    return outcome(wrong, error=error)


_MODULES = ("flash_attn", "flash_attn_interface", "xformers", "sageattention", "triton", "apex")


def extensions(device: str) -> dict[str, Any]:
    """Import each of `_MODULES` that is installed; `device` is not used."""
    wrong, versions = [], {}
    for name in _MODULES:
        if util.find_spec(name) is None:
            continue
        try:
            module = import_module(name)
        except Exception as error:  # noqa: BLE001 - an extension may raise anything
            text = " ".join(str(error).split())[:200]
            wrong.append(f"{name} can't be imported: {type(error).__name__}: {text}")
            continue
        versions[name] = str(getattr(module, "__version__", "?"))
    return outcome(wrong, versions=versions)
