"""A fault in words: which operation, where, and why. Read next: `guarding.py`."""

from __future__ import annotations

import torch

from everyframe.numerics.locate import Fault
from everyframe.precision.dtypes import dtype_name

_CAUSES: dict[str, str] = {
    "range": "in float32 it is {wide}, and {dtype} ends at {limit:.0f}",
    "kernel": "in float32 it is {wide}, which fits into {dtype}: the kernel is wrong, or "
    "adds up too narrowly",
    "formula": "the same operation is not finite in float32 either",
    "lost": "the operation alone is not finite in float32 either, the module is: {dtype} lost "
    "something before it",
    "unclear": "this kernel has no float32 form to compare with",
}


def told_of(fault: Fault, why: str) -> str:
    """The fault in a clause; `why` is one of `_CAUSES`."""
    dtype = dtype_name(fault.dtype)
    told = _CAUSES[why].format(wide=fault.wide, dtype=dtype, limit=torch.finfo(fault.dtype).max)
    return (
        f"{fault.operation} in {fault.place} made values that are not finite in {dtype} "
        f"(operands {fault.given}, result {fault.made}; {told})"
    )
