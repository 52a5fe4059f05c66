"""Float32 that is float32: no device may round products to fewer bits behind a plan's back.

cuDNN multiplies float32 convolutions in TF32 (10 bits after the point) by PyTorch's default, on
every card since Ampere; a plan that says float32 for the autoencoder would not get it. Not here:
which precision a component has (`policy`). Read next: `everyframe.engine.run`, which enters this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Within, float32 convolutions and matrix products are not cut to TF32 or bfloat16."""
    # Made when torch is imported, so type checkers see none of them.
    backends: Any = torch.backends
    operations = (
        backends.cudnn.conv,
        backends.cuda.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.matmul,
    )
    before = [operation.fp32_precision for operation in operations]
    for operation in operations:
        operation.fp32_precision = "ieee"
    try:
        yield
    finally:
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision
