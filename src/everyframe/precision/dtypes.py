"""Dtypes by torch's names: sizes in bytes, and conversion to and from torch types.

Only the functions that return torch types import torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from everyframe.core.errors import InputError

if TYPE_CHECKING:
    import torch

#: Bytes per element of the floating dtypes that parameters can have.
NUM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def num_bytes(dtype: str) -> int:
    """Bytes per element.

    Raises:
        InputError: not one of `NUM_BYTES`.
    """
    if dtype not in NUM_BYTES:
        raise InputError(f"dtype must be one of {', '.join(NUM_BYTES)}, got {dtype!r}")
    return NUM_BYTES[dtype]


def island_dtype(dtype: str) -> str:
    """Dtype of an island: float64 stays float64, everything narrower becomes float32."""
    return dtype if num_bytes(dtype) > 4 else "float32"


def torch_dtype(dtype: str) -> torch.dtype:
    """Torch's dtype of that name."""
    import torch

    num_bytes(dtype)
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
