"""Dtypes by torch's names: sizes for planning, and the way to torch and back.

torch is imported only by the functions that hand out or take its types.
Read next: `everyframe.precision.islands`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from everyframe.core.errors import InputError

if TYPE_CHECKING:
    import torch

#: Bytes per element of every floating dtype that parameters can have here.
NUM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def num_bytes(dtype: str) -> int:
    """Bytes that one element takes.

    Raises:
        InputError: not one of `NUM_BYTES`.
    """
    if dtype not in NUM_BYTES:
        raise InputError(f"dtype must be one of {', '.join(NUM_BYTES)}, got {dtype!r}")
    return NUM_BYTES[dtype]


def island_dtype(dtype: str) -> str:
    """float64 as it is, float32 for everything narrower: the dtype of an island."""
    return dtype if num_bytes(dtype) > 4 else "float32"


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's type of that name."""
    import torch

    num_bytes(dtype)
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of torch's type, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
