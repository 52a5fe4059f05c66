"""Float32 that is float32, and sums in float32: no device may round behind a plan's back.

cuDNN multiplies float32 convolutions in TF32 (10 bits after the point) by PyTorch's default, on
every card since Ampere; a plan that says float32 for the autoencoder would not get it. And cuBLAS
may add up the parts of a half precision product in half precision, by default too: a sum overflows
where the result would fit. Not here: which precision a component has (`policy`).

PyTorch has two sets of switches for the first. Whoever asks for an old one (`cudnn.flags`, torch's
compiler, other libraries) gets an error where the new ones say something else, so both are set.
Read next: `everyframe.engine.run`, which enters this.
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

#: Switches of CUDA's matrix products that let sums be kept in half precision.
_NARROW_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def strict_float32() -> Iterator[None]:
    """Within, float32 products are not cut to TF32 or bfloat16, and narrow products sum widely.

    The switches are the process': no other run of ours computes meanwhile (`hardware.switches`).
    """
    with exclusive(), _switched():
        yield


@contextmanager
def _switched() -> Iterator[None]:
    # Made when torch is imported, so type checkers see none of them.
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
    """Those that hold for that thread, and those that hold for the process just now."""
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
    """Whether cuDNN may use TF32, and the precision of products, as the old switches say.

    Where they and the new ones disagree already torch does not tell, and nobody can rely on them.
    """
    try:
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return True, "highest"  # as torch begins


def _set_old_switches(cudnn_allows_tf32: bool, products: str) -> None:
    # Each sets new ones too, which come after it.
    torch.backends.cudnn.allow_tf32 = cudnn_allows_tf32
    torch.set_float32_matmul_precision(products)
