"""Strict float32: disable TF32 and reduced-precision accumulation while a run computes.

By PyTorch's default, cuDNN computes float32 convolutions in TF32 (10 mantissa bits) on every card
since Ampere, so a plan's float32 autoencoder would not run in float32. cuBLAS may also accumulate
half precision products in half precision, and a sum then overflows where the result would fit.

PyTorch has an old and a new set of switches for TF32. Code that reads an old one (`cudnn.flags`,
torch's compiler, other libraries) fails if the new ones disagree, so both are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everyframe.core.plan import Switches
from everyframe.hardware.switches import exclusive
from everyframe.hardware.thread_state import ThreadState
from everyframe.ops.attention import Kernels

#: Switches that let CUDA matrix products accumulate in half precision.
_NARROW_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def strict_float32() -> Iterator[None]:
    """Context: float32 products stay float32, and half precision products accumulate in float32.

    The switches are process-wide; a lock keeps other runs of this process from computing meanwhile
    (`hardware.switches`).
    """
    with exclusive(), _switch():
        yield


@contextmanager
def _switch() -> Iterator[None]:
    # Set when torch is imported, so type checkers don't see them.
    backends: Any = torch.backends
    operations = (
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.cuda.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.matmul,
    )
    before = [operation.fp32_precision for operation in operations]
    old = _old_switches()
    _set_old_switches(False, "highest")
    for operation in operations:
        operation.fp32_precision = "ieee"
    products = backends.cuda.matmul
    allowed = [getattr(products, switch) for switch in _NARROW_SUMS]
    for switch in _NARROW_SUMS:
        setattr(products, switch, False)
    try:
        yield
    finally:
        _set_old_switches(*old)
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision
        for switch, before_it in zip(_NARROW_SUMS, allowed, strict=True):
            setattr(products, switch, before_it)


def switches_of(thread: ThreadState) -> Switches:
    """Current numeric switches, of that thread and of the process."""
    backends: Any = torch.backends
    operations = {
        "convolutions of cuDNN": backends.cudnn.conv,
        "recurrent layers of cuDNN": backends.cudnn.rnn,
        "products of CUDA": backends.cuda.matmul,
        "convolutions of oneDNN": backends.mkldnn.conv,
        "products of oneDNN": backends.mkldnn.matmul,
    }
    return Switches(
        num_threads=thread.num_threads,
        casts=thread.casts_to,
        float32=tuple((name, each.fp32_precision) for name, each in operations.items()),
        narrow_sums=tuple(name for name in _NARROW_SUMS if getattr(backends.cuda.matmul, name)),
        attention=tuple(sorted(each.name.lower() for each in Kernels.now().allowed)),
    )


def _old_switches() -> tuple[bool, str]:
    """Read the old switches: whether cuDNN may use TF32, and the precision of matrix products.

    If they already disagree with the new ones, torch can't tell; its defaults are returned then.
    """
    try:
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return True, "highest"  # as torch begins


def _set_old_switches(cudnn_allows_tf32: bool, products: str) -> None:
    # Each also sets new ones, so those are restored afterwards.
    torch.backends.cudnn.allow_tf32 = cudnn_allows_tf32
    torch.set_float32_matmul_precision(products)
